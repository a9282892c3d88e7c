"""`anaphora simulate`: exit codes, the same bytes twice, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from tiny_tokenizer import make_tiny_tokenizer
from typer.testing import CliRunner

from anaphora.cli.simulate import simulate
from anaphora.cli.simulate_table import _times
from anaphora.errors import ConfigError, TraceError

EXCERPT = str(Path(__file__).parent / "traces" / "conversation_head.jsonl")
app = typer.Typer()
app.command()(simulate)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_table_a_point_a_row_and_the_bound() -> None:
    shown = run(EXCERPT, "--blocks", "500,1k", "--policy", "lru,offline")
    rows = [line.split() for line in shown.splitlines()]
    assert [row[:4] for row in rows if row and row[0] in ("lru", "offline", "unbounded")] == [
        ["lru", "500", "256,000", "3.57%"],
        ["lru", "1,000", "512,000", "3.57%"],
        ["offline", "500", "256,000", "4.57%"],
        ["offline", "1,000", "512,000", "4.57%"],
        ["unbounded", "3,918", "2,006,016", "4.57%"],
    ]
    assert shown == run(EXCERPT, "--blocks", "500,1k", "--policy", "lru,offline")


def test_json_is_one_document() -> None:
    document = json.loads(run(EXCERPT, EXCERPT, "--blocks", "500", "--block-size", "256,1024", "--json"))
    assert len(document["traces"]) == 2
    assert [(s["block_size"], s["exact"]) for s in document["traces"][0]["block_sizes"]] == [(256, False), (1024, True)]


def test_timed_mode_shows_the_parts_of_the_time_to_first_token() -> None:
    shown = run(EXCERPT, "--blocks", "1k", "--mode", "timed", "--arrival-scale", "10")
    assert "TTFT p50" in shown
    assert shown == run(EXCERPT, "--blocks", "1k", "--mode", "timed", "--arrival-scale", "10")


def test_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\nnonsense\n')
    with pytest.raises(TraceError, match="line 2: not JSON"):
        run(str(path))
    assert "1 broken lines left out" in run(str(path), "--skip-bad")


@pytest.mark.parametrize("text", ["", "1,,2", "0", "-5", "x", "1.5", "٣"])
def test_sizes_must_be_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="--blocks must be integers"):
        run(EXCERPT, "--blocks", text)


@pytest.mark.parametrize(
    ("text", "message"), [("\n", "has no requests$"), ("nonsense\n", r"has no requests \(1 broken lines left out\)$")]
)
def test_a_trace_without_requests_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        run(str(path), "--skip-bad")


def test_times_have_units_and_no_negative_zero() -> None:
    shown = run(EXCERPT, "--blocks", "1k", "--mode", "timed", "--arrival-scale", "10")
    (header,) = (line for line in shown.splitlines() if line.startswith("policy"))
    assert header.endswith("TTFT p50 s  p99 s  queue s  wait s  compute s")
    part = {"mean": -1e-9}
    point = {"ttft_s": {"p50": -1e-9, "p99": 1.0}, "queue_s": part, "wait_s": part, "compute_s": None}
    assert list(_times(point)) == ["0.00", "1.00", "0.00", "0.00", "-"]


def test_a_workload_needs_no_file(tmp_path: Path) -> None:
    arguments = ("--generate", "chat", "--requests", "30", "--seed", "3", "--blocks", "1k")
    shown = run(*arguments)
    assert shown.startswith("chat, seed 3: 30 requests, ")
    assert "sequential, with outputs, block size 16\n" in shown
    assert shown == run(*arguments) != run(*arguments, "--rate", "9", "--own-tokens", "7")


def test_a_workload_can_be_written_in_mooncakes_format(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    arguments = ("--generate", "agents", "--requests", "30", "--write", str(path))
    run(*arguments, "--blocks", "1k")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["hash_ids"]) for line in lines] == [-(-line["input_length"] // 512) for line in lines]
    with_size = run(*arguments, "--block-size", "64,96", "--blocks", "9k")
    assert json.loads(path.read_text().splitlines()[0])["block_size"] == 32
    assert run(str(path), "--block-size", "64,96", "--blocks", "9k").splitlines()[1:] == with_size.splitlines()[1:]


def test_a_recording_says_what_the_engine_had(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]}
    lines = [line | {"cached_tokens": 0}, line | {"cached_tokens": 4}]
    header = {"format": "anaphora-trace", "version": 1, "block_size": 4}
    path.write_text("".join(json.dumps(entry) + "\n" for entry in (header, *lines)))
    assert "the engine that recorded it had a hit rate of 25.00%\n" in run(str(path), "--blocks", "10")


def test_a_log_of_requests_with_a_tokenizer(tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 50}) + "\n" + json.dumps({"prompt": "a" * 50 + "b"}) + "\n")
    document = json.loads(
        run(str(path), "--tokenizer", str(tmp_path), "--block-size", "8,12", "--blocks", "99", "--json")
    )
    sizes = document["traces"][0]["block_sizes"]
    assert [(s["exact"], s["points"][0]["num_saved_tokens"]) for s in sizes] == [(True, 48), (True, 48)]
    with pytest.raises(ConfigError, match="there is no tokenizer in"):
        run(str(path), "--tokenizer", str(tmp_path / "none"))


def test_a_cost_is_shown_with_what_it_leaves_unexplained(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    rows = [{"prompt_tokens": n, "cached_tokens": 0, "ttft_s": 0.002 + n * 1e-4} for n in (100, 200, 400)]
    bench.write_text(json.dumps({"requests": rows}))
    timed = (
        "--generate",
        "shared-prefix",
        "--requests",
        "5",
        "--output-tokens",
        "5",
        "--blocks",
        "1k",
        "--mode",
        "timed",
    )
    shown = run(*timed, "--cost-from", str(bench))
    assert "a step takes 2 ms + 100 us a token + 0 ns a (token, position) pair\n" in shown
    assert "fitted to 3 requests: off by " in shown
    assert "a step takes 7 ms + 40 us a token + 1.5 ns" in run(*timed, "--cost", "overhead=7ms")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (EXCERPT, "--generate", "chat"),
        (EXCERPT, "--requests", "5"),
        (EXCERPT, "--write", "x"),
        ("--generate", "nothing"),
        ("--generate", "chat", "--requests", "0"),
        (EXCERPT, "--cost", "token=1ms", "--cost-from", "x"),
        (EXCERPT, "--cost", "nonsense"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        run(*arguments)


def test_a_plot_says_where_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    result = CliRunner().invoke(app, [EXCERPT, "--blocks", "500", "--plot", str(path)], catch_exceptions=False)
    assert result.stderr == f"wrote {path}\n" and path.exists()
