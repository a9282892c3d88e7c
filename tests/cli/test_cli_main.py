"""The command line without a model: help, versions, exit codes, options. Nothing here may import torch."""

from __future__ import annotations

import dataclasses
import io
import os
import shlex
import subprocess
import sys

import pytest
import typer

from anaphora.cli import console
from anaphora.cli.main import app, main
from anaphora.cli.options import EngineOptions, SamplingOptions
from anaphora.config import EngineConfig
from anaphora.sampling_params import SamplingParams

COMMANDS = ("generate", "chat", "demo", "models", "serve", "simulate", "top", "forget")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=kept | environment, timeout=120, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"anaphora {command}" in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["80", "200"])
def test_help_shows_every_name_and_every_word_whole(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option is cut to fit a terminal, no word in square brackets is taken for markup."""
    monkeypatch.setenv("COLUMNS", columns)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    wanted = set()
    for name, command in commands.items():
        texts = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
        words = {word for text in texts if text for word in text.split() if "-" not in word}  # a line may end at one
        names = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert words - set(shown.split()) == set()
        assert names - set(shown.replace(",", " ").split()) == set()
        wanted |= words | names
    assert {"[admin],", "--max-pinned-share-per-tenant"} <= wanted


def test_top_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "anaphora", "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "anaphora 0.1.0\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "anaphora 0.1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["generate", "--top-p", "0", "a"],
        ["generate", "--model", "smolm2-135m", "a"],
        ["generate", "--model", "./no-such", "a"],
        ["generate", "--tokenizer", "no-such", "a"],
        ["generate", ""],
        ["chat", "--model", "gemma3-270m"],
        ["serve", "no-such", "--port", "0"],
        ["demo", "--model", "no-such"],
    ],
)
def test_what_needs_no_model_imports_no_tensors(arguments: list[str]) -> None:
    code = (
        f"import sys; from anaphora.cli.main import main; main({arguments!r}); "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert run_python(code).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")], ids=["unset", "set by the user"]
)
def test_openmp_threads_sleep_unless_the_user_wants_them_to_spin(given: dict[str, str], policy: str) -> None:
    code = "import os; from anaphora.cli.main import main; main(['--version']); print(os.environ['OMP_WAIT_POLICY'])"
    assert run_python(code, **given).stdout.splitlines()[-1] == policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--top-p", "0"], "--top-p must be in (0, 1], got 0; for greedy choice set temperature=0"),
        (
            ["generate", "a", "--max-tokens", "0"],
            "--max-tokens must be an integer >= 1 (or 0 with prompt_logprobs, which scores the prompt and generates "
            "nothing), got 0",
        ),
        (
            ["generate", "a", "--temperature", "nan"],
            "--temperature must be a finite number, got nan; in [0, 100]; 0 is greedy",
        ),
        (["generate", "a", "--logit-bias", "7"], "logit bias must look like TOKEN_ID=NUMBER, got '7'"),
        (["chat", "--stop", ""], "--stop must hold non-empty strings, got ('',)"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"error: {message}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "-", "-"],
        ["generate", "a", "--system", "b"],
        ["generate", "a", "--logprobs", "2"],
        ["generate", "-f", "no-such-file"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("debug", [["--debug"], []])
def test_debug_shows_the_traceback(debug: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from anaphora.errors import InvalidParameterError

    if not debug:
        monkeypatch.setenv("ANAPHORA_DEBUG", "1")
    with pytest.raises(InvalidParameterError):
        main([*debug, "generate", "a", "--top-p", "0"])


def test_engine_options_are_the_fields_of_the_config() -> None:
    options = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    config = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    assert options == config | {"model": "smollm2-135m"}


def test_sampling_options_reach_the_sampling_params() -> None:
    options = SamplingOptions(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.6,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=["7=-2.5", "8=100"],
        stop=["a", "b"],
        stop_token_id=[5],
        ignore_eos=True,
        logprobs=2,
        include_stop=True,
        special_tokens=True,
    )
    assert options.params() == SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.6,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={7: -2.5, 8: 100.0},
        stop=("a", "b"),
        stop_token_ids=(5,),
        ignore_eos=True,
        logprobs=2,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )


def test_json_has_null_for_what_it_cannot_say(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"a": [float("-inf"), 1.5, (float("nan"),)], "ü": "ü"})
    assert capsys.readouterr().out == '{"a": [null, 1.5, [null]], "ü": "ü"}\n'


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 1), (["--help"], 1), (["generate", "a", "--top-p", "0"], 2)]
)
def test_a_reader_that_leaves_is_no_traceback(arguments: list[str], code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before the command writes anything: its first flush meets a broken pipe
    program = (
        f"import sys; from anaphora.cli.main import main; sys.stdout.write('waits'); sys.exit(main({arguments!r}))"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=buffered,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert done.returncode == code
    assert "BrokenPipeError" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [(">&-", 0, ""), ("<&-", 0, ""), (">/dev/full", 1, "error: [Errno 28] No space left on device\n")],
)
def test_a_stream_that_is_closed_or_full_is_no_traceback(redirection: str, code: int, error: str) -> None:
    code_text = "import sys; from anaphora.cli.main import main; sys.exit(main(['--version']))"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code_text)} {redirection}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (code, error)
