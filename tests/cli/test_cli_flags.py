"""Claims: an error speaks of options as the command line does, and changes nothing else of what it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from anaphora.cli.console import print_error, stderr, stdout, tables
from anaphora.cli.flags import in_flags
from anaphora.cli.main import app, main
from anaphora.errors import ConfigError


def command(name: str) -> Any:
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], ""),
        (["--num-blocks", "0"], "--num-blocks must be an integer >= 1, got 0"),
        (["--num-blocks", "9", "--kv-cache-bytes", "9"], "--num-blocks and --kv-cache-bytes both size the pool"),
        (["--dtype", "float8"], "--dtype must be one of "),
        (["--seed", "-1"], "--seed must be an integer >= 0, got -1"),
        (["--reproducible", "--no-fast-forward"], "own forward pass: leave --fast-forward on"),
        (["--max-pinned-share-per-tenant", "2"], "--max-pinned-share-per-tenant must be a number in [0, 1], got 2.0"),
        (["--top-p", "0"], "--top-p must be in (0, 1], got 0; for greedy choice set temperature=0"),
        (["--stop-token-id", "-1"], "--stop-token-id must be a list of token ids"),
        (["--stop", ""], "--stop must hold non-empty strings"),
        (["--logit-bias", "7=1000"], "--logit-bias must be in [-100, 100], got 1000.0"),
        (["--record", "/"], "--record: / exists already"),
    ],
)
def test_generate_names_the_flag(
    arguments: list[str], message: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", str(tiny_model), "-n", "1", *arguments, "a"]) == (2 if arguments else 0)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-timeout", "0"], "--request-timeout must be a finite number of at least 0.001, got 0.0"),
        (["--max-n", "0"], "--max-n must be a finite number of at least 1, got 0"),
        (
            ["--share-cache", "a,b"],
            "--share-cache names tenants, and without a key file there are none: give --api-key-file",
        ),
    ],
)
def test_serve_names_the_flag(
    arguments: list[str], message: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tiny_model), "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_prompt_that_is_too_long_names_the_flag(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", str(tiny_model), "--max-model-len", "8", "123456789"]) == 2
    assert "(--max-model-len)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        "there is no file or folder /tmp/num_blocks/block_size.txt",
        "the key 'num_blocks' of my_num_blocks_2",
        "num_blocks_each and num_blocks/7 and num_blocks.py",
        "the model needs a device",
        "seeds must be small",
    ],
)
def test_what_names_no_option_stays(message: str) -> None:
    assert in_flags(message, command("generate")) == message


def test_what_is_printed_is_not_read_for_signs(capsys: pytest.CaptureFixture[str]) -> None:
    """rich makes a thumb of `:-1:` and a heart of `:heart:`, and takes brackets for markup."""
    text = "[bold] 127.0.0.1:-1: :heart: [/]"
    for console in (stdout(), stderr(), tables()):
        console.print(text)
    print_error(ConfigError(text))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{text}\n" * 2, f"{text}\nerror: {text}\n")


def test_a_command_without_options_names_none() -> None:
    assert in_flags(": nothing is named", SimpleNamespace(params=[])) == ": nothing is named"
