"""`anaphora simulate`: exit codes, the same bytes twice, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from anaphora.cli.simulate import _times, simulate
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


def test_a_plot_says_where_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    result = CliRunner().invoke(app, [EXCERPT, "--blocks", "500", "--plot", str(path)], catch_exceptions=False)
    assert result.stderr == f"wrote {path}\n" and path.exists()
