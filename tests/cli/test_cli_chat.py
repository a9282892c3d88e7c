"""`anaphora chat` with piped input, on a tiny model that can only say `a`: every count is known."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from anaphora.api.open_requests import OpenRequests
from anaphora.cli.main import main
from anaphora.engine.chat_template import NO_CHAT_TEMPLATE

SAY_A = ["--logit-bias", "64=100"]


def chat(monkeypatch: pytest.MonkeyPatch, turns: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(turns))
    return main(["chat", *SAY_A, *arguments])


def test_each_turn_reuses_the_conversation(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    turns = "hello\n\n  again  \n/reset\nhello\n/exit\nnever read\n"
    assert chat(monkeypatch, turns, "--model", str(tiny_model), "-n", "16") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("cached")] == [
        "a" * 16,
        "a" * 16,
        "conversation forgotten",
        "a" * 16,
    ]
    first = len("<user>hello\n<assistant>")
    second = first + 16 + len("\n<user>again\n<assistant>")
    # K/V of the first turn: 23 + 16 tokens less the last one, which no step has computed: 2 whole blocks
    assert [line.split(" · TTFT")[0] for line in lines if line.startswith("cached")] == [
        f"cached 0 of {first} tokens · computed {first}",
        f"cached 32 of {second} tokens · computed {second - 32}",
        f"cached 16 of {first} tokens · computed {first - 16}",
    ]
    assert all(line.endswith("16 new (length: max_tokens)") for line in lines if line.startswith("cached"))


def test_the_system_message_begins_every_conversation(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "a\n/reset\na\n", "--model", str(tiny_model), "-n", "1", "--system", "be brief") == 0
    length = len("<system>be brief\n<user>a\n<assistant>")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("cached")]
    assert [line.split(" tokens")[0] for line in lines] == [f"cached 0 of {length}", f"cached 32 of {length}"]


def test_ctrl_c_stops_the_answer_and_keeps_the_session(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = 0
    live: list[int] = []
    original = OpenRequests._step

    def interrupted(self: OpenRequests) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        original(self)
        live.append(self._engine.stats().gauges.num_live_blocks)

    monkeypatch.setattr(OpenRequests, "_step", interrupted)
    assert chat(monkeypatch, "hello\nagain\n", "--model", str(tiny_model), "-n", "8") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:3] == ["aaa", "stopped", "a" * 8]
    # the three words that came stay in the conversation
    length = len("<user>hello\n<assistant>aaa\n<user>again\n<assistant>")
    assert lines[3].startswith(f"cached 16 of {length} tokens")
    assert live[-1] == 0


def test_piped_input_ends_at_the_first_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    turns = "a\n" + "b" * 200 + "\na\n"
    assert chat(monkeypatch, turns, "--model", str(tiny_model), "-n", "1", "--num-blocks", "4") == 2
    shown = capfd.readouterr()
    assert shown.out.count("cached") == 1
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1


def test_an_unknown_command_is_an_error_and_a_path_is_text(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "/etc/passwd\n/rest now\na\n", "--model", str(tiny_model), "-n", "1") == 2
    shown = capfd.readouterr()
    assert shown.out.count("cached") == 1  # the path alone was sent
    assert shown.err == "error: /rest: the commands are /reset and /exit, alone on a line; nothing was sent\n"


def test_what_a_conversation_has_no_place_for_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--logprobs", "2"]) == 2
    assert "--logprobs has no place in a conversation" in capfd.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second is Python's choice in the C locale
def test_input_that_is_not_utf8_is_said_to_be_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], errors: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"h\xff\n"), encoding="utf-8", errors=errors))
    assert main(["chat", "--model", str(tiny_model), "-n", "1"]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: the input is not UTF-8 text: invalid ") and shown.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["chat"], ["generate", "--chat", "a"]])
def test_a_builtin_model_without_template_is_refused_before_it_is_fetched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main([*arguments, "--model", "gemma3-270m", "--cache-dir", str(tmp_path / "cache")]) == 2
    assert capfd.readouterr().err == f"error: {NO_CHAT_TEMPLATE}\n"
    assert not (tmp_path / "cache").exists()
