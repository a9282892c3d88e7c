"""`anaphora generate` and `anaphora models` on a tiny model whose tokens are bytes, so that every count is known."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_tiny_gguf

from anaphora.api.llm import LLM
from anaphora.cli.generate import InOrder
from anaphora.cli.main import main
from anaphora.cli.report import Limits
from anaphora.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from anaphora.runtime.sources.names import is_model

ONE, TWO = "Hello there, this is a beginning", "Hello there, this is another"  # 32 and 28 bytes, 21 in common
_MORE = ["no weights", "encoder", "path", "hub", "tokenizer", "tokenizer path", "empty", "empty file"]


def generate(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run with --json; stdout, down to the file descriptor, must be one document and nothing else."""
    assert main(["generate", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capfd.readouterr().out)
    return document


def test_json_counts_what_each_prompt_reused(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = generate(capfd, ONE, TWO, "--model", str(tiny_model), "-n", "3")
    requests = document["requests"]
    assert [request["prompt"] for request in requests] == [ONE, TWO]
    assert [request["num_prompt_tokens"] for request in requests] == [32, 28]
    assert [request["num_cached_tokens"] for request in requests] == [0, 16]
    assert [request["num_computed_prompt_tokens"] for request in requests] == [32, 12]
    assert [request["finish_reason"] for request in requests] == ["length", "length"]
    assert [len(request["token_ids"]) for request in requests] == [3, 3]
    assert all(0 < request["ttft_s"] < request["e2e_s"] for request in requests)
    assert "logprobs" not in requests[0]
    counters = document["stats"]["counters"]
    assert (counters["num_queried_tokens"], counters["num_hit_tokens"]) == (60, 16)


def test_caching_off_reuses_nothing_and_answers_the_same(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    on = generate(capfd, ONE, TWO, "--model", str(tiny_model), "-n", "8")
    off = generate(capfd, ONE, TWO, "--model", str(tiny_model), "-n", "8", "--no-prefix-caching")
    assert [request["num_cached_tokens"] for request in off["requests"]] == [0, 0]
    assert [request["token_ids"] for request in off["requests"]] == [request["token_ids"] for request in on["requests"]]


def test_prompts_come_from_arguments_stdin_and_files_in_that_order(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("from a\n\n")
    (tmp_path / "b").write_text("from b")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    files = ["-f", str(tmp_path / "a"), "--file", str(tmp_path / "b")]
    document = generate(capfd, *files, "first\n", "-", "--model", str(tiny_model), "-n", "1")
    prompts = [request["prompt"] for request in document["requests"]]
    # one final newline of a file and of stdin is dropped, and no other
    assert prompts == ["first\n", "from stdin", "from a\n", "from b"]


def test_a_pipe_is_read_where_no_prompt_is_given(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    [request] = generate(capfd, "--model", str(tiny_model), "-n", "1")["requests"]
    assert request["prompt"] == "from stdin"


@pytest.mark.parametrize("kind", ["built-in", "folder", "file"])
def test_a_model_where_the_prompt_stands_is_not_taken_for_one(
    kind: str, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").touch()
    name = {"built-in": "SmolLM2-135m", "folder": str(tiny_model), "file": str(tmp_path / "a.gguf")}[kind]
    assert main(["generate", name, "Hello"]) == 2
    assert f"name it with -m {name}." in " ".join(capfd.readouterr().err.replace("│", " ").split())
    monkeypatch.setenv("COLUMNS", "200")
    [request] = generate(capfd, name, "--model", str(tiny_model), "-n", "1")["requests"]  # who says both means both
    assert request["prompt"] == name


@pytest.mark.parametrize("text", ["a/b", "smollm", "README.md", "x" * 5000, "~nobody", "\u00e9", "."])
def test_what_is_no_model_is_a_prompt(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    assert not is_model(text)


def test_chat_puts_prompts_through_the_template(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = generate(capfd, "hi", "--chat", "--system", "be", "--model", str(tiny_model), "-n", "1")
    assert document["requests"][0]["num_prompt_tokens"] == len("<system>be\n<user>hi\n<assistant>")


def test_logprobs_name_the_chosen_token_first(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [request] = generate(capfd, ONE, "--model", str(tiny_model), "-n", "2", "--logprobs", "2")["requests"]
    assert [position[0]["token_id"] for position in request["logprobs"]] == request["token_ids"]
    assert [[entry["rank"] for entry in position] for position in request["logprobs"]] == [[1, 2], [1, 2]]


def test_the_salt_reaches_the_requests(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    salts: list[str | None] = []
    original = LLM.generate

    def recording(self: LLM, *args: Any, cache_salt: str | None = None, **kwargs: Any) -> Any:
        salts.append(cache_salt)
        print("what a library prints must not end up in the document")
        return original(self, *args, cache_salt=cache_salt, **kwargs)

    monkeypatch.setattr(LLM, "generate", recording)
    generate(capfd, ONE, "--model", str(tiny_model), "-n", "1", "--cache-salt", "tenant")
    assert salts == ["tenant"]


def test_people_get_the_text_and_one_line_about_it(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    forced = ["--logit-bias", "64=100"]  # byte 64 of the alphabet is `a`
    assert main(["generate", ONE, TWO, "--model", str(tiny_model), "-n", "3", *forced]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == [f"[1/2] {ONE}", "aaa"]
    assert lines[2].startswith("cached 0 of 32 tokens · computed 32 · TTFT ")
    assert lines[2].endswith(" · 3 new (length: max_tokens)")
    assert lines[3:5] == [f"[2/2] {TWO}", "aaa"]
    assert lines[5].startswith("cached 16 of 28 tokens · computed 12 · TTFT ")
    assert len(lines) == 6


def test_a_failed_request_is_told_after_the_others(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anaphora.runtime.executor import TorchExecutor

    def failing(self: TorchExecutor, plan: object) -> object:
        raise RuntimeError("out of order")

    monkeypatch.setattr(TorchExecutor, "execute", failing)
    assert main(["generate", ONE, "--model", str(tiny_model), "--json"]) == 1
    shown = capfd.readouterr()
    assert json.loads(shown.out)["requests"][0]["finish_reason"] == "error"
    assert "error: 1 of 1 requests failed: 1 (the step failed: RuntimeError: out of order)" in shown.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a", "--model", "smolm2-135m"], 2, "error: unknown model 'smolm2-135m'. Did you mean smollm2-135m?"),
        (["a", "--model", "{broken}"], 2, "error: {broken} has no config.json"),
        (["a", "--block-size", "0"], 2, "error: --block-size must be an integer >= 1, got 0\n"),
        (["a", "--model", "{tiny}", "--max-model-len", "9999"], 2, "error: --max-model-len 9999 is more than"),
        (["a", "b" * 65, "--model", "{tiny}", "--num-blocks", "4"], 2, "error: "),
        (["a", "--model", "{cut}"], 2, "error: {cut} has a config.json and no weights"),
        (["a", "--model", "{encoder}"], 2, "error: encoder is a BertModel, which has no causal LM head"),
        (["a", "--model", "no/such/path"], 2, "error: there is no file or folder no/such/path"),
        (["a", "--model", "no-such/model"], 2, "error: the model no-such/model is neither a folder here nor"),
        (["a", "--tokenizer", "no-such"], 2, "error: unknown tokenizer 'no-such'. "),
        (
            ["a", "--tokenizer", "./no-such"],
            2,
            "error: tokenizer: there is no file or folder ./no-such: check the path",
        ),
        (["a", "", "--model", "{tiny}"], 2, "error: prompt 2 of 2 (argument) is empty: give it some text\n"),
        (["a", "-f", "{empty}"], 2, "error: prompt 2 of 2 ({empty}) is empty: give it some text\n"),
        (["a", "--model", "{tiny}", "--cache-salt", ""], 2, "error: "),
        (["-f", "{binary}"], 2, "error: {binary} is not UTF-8 text: invalid start byte at byte 0\n"),
    ],
    ids=["unknown", "broken", "option", "context", "pool", *_MORE, "salt", "binary"],
)
def test_errors_are_one_line_on_stderr(
    tiny_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("broken", "cut", "encoder"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("\n")
    places = {f"{{{name}}}": str(tmp_path / name) for name in ("broken", "cut", "encoder", "binary", "empty")}
    places["{tiny}"] = str(tiny_model)
    assert main(["generate", "--json", *(places.get(argument, argument) for argument in arguments)]) == code
    shown = capfd.readouterr()
    assert shown.out == ""
    for place, path in places.items():
        message = message.replace(place, path)
    lines = shown.err.splitlines()
    assert lines[-1:] and f"{lines[-1]}\n".startswith(message)
    assert lines[:-1] in ([], ["Fetching no-such/model from the hub ..."])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-n", "4"], "4 new (length: max_tokens)"),
        (["--max-model-len", "36"], "4 new (length: max_model_len)"),
        (["--num-blocks", "2", "-n", "5"], "1 new (length: pool full)"),  # 32 tokens, and one whose K/V nobody needs
    ],
)
def test_the_limit_that_ended_an_output_is_named(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    assert main(["generate", ONE, "--model", str(tiny_model), "--logit-bias", "64=100", *options]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith(f" · {reason}")


def test_conversion_is_told_where_stderr_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", quantization="Q4_1")
    arguments = ["generate", "ab", "--model", str(gguf), "--cache-dir", str(tmp_path / "cache"), "-n", "1"]
    assert main(arguments) == 0
    told = capfd.readouterr().err.splitlines()
    assert told[:2] == ["Reading the tokenizer of tiny.gguf ...", "Converting tiny.gguf ..."]
    assert told[2].startswith("Writing ") and len(told) == 3
    assert main(arguments) == 0
    assert capfd.readouterr().err == ""


def test_outputs_are_shown_in_order_and_none_waits_for_a_later_one(capfd: pytest.CaptureFixture[str]) -> None:
    show, shown = InOrder(["a", "b", "c"], Limits(9, None, 99)), []
    for index in (1, 0, 2):
        completion = CompletionOutput(0, f"text {index}", [], None, "stop")
        show(index, RequestOutput("r", None, [1], 0, [completion], True, RequestMetrics(0.0, e2e_s=0.0)))
        shown.append(capfd.readouterr().out.splitlines())
    line = "cached 0 of 1 tokens · computed 0 · 0 new (stop)"
    assert shown == [
        [],
        ["[1/3] a", "text 0", line, "[2/3] b", "text 1", line],
        ["[3/3] c", "text 2", line],
    ]


def test_models_lists_the_names_and_what_is_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json", "--cache-dir", str(tmp_path)]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [(info["name"], info["cached"], info["path"]) for info in found] == [
        ("smollm2-135m", False, None),
        ("gemma3-270m", False, None),
    ]
    assert main(["models", "--cache-dir", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "smollm2-135m" in shown and "gemma3-270m" in shown
