"""A broken line is named with its number and the reason, or left out and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anaphora.errors import TraceError
from anaphora.sim.mooncake import parse_mooncake, read_mooncake

GOOD = {"timestamp": 5, "input_length": 1025, "output_length": 3, "hash_ids": [1, 2, 3]}


def line(**changes: object) -> str:
    return json.dumps(GOOD | changes)


BROKEN = {
    '{"timestamp": 5,': "not JSON",
    "[" * 100_000: "not JSON",
    "[1]": "expected a JSON object, got list",
    line(timestamp=None): "timestamp must be a number",
    line(timestamp=-1): "timestamp must be a number",
    line(timestamp=True): "timestamp must be a number",
    line(timestamp=float("nan")): "timestamp must be a number",
    line(timestamp=4): "time goes back: 4 ms after 5 ms",
    line(input_length=-1): "input_length must be an integer >= 1, got -1",
    line(input_length=0, hash_ids=[]): "input_length must be an integer >= 1, got 0",
    line(input_length=1.5): "input_length must be an integer",
    line(output_length=-2): "output_length must be an integer >= 0",
    line(hash_ids=[1, 2]): "1025 input tokens take 3 ids of 512, got 2",
    line(hash_ids=[1, 2, 3, 4]): "1025 input tokens take 3 ids of 512, got 4",
    line(hash_ids="123"): "hash_ids must be a list",
    line(hash_ids=[1, 2, "3"]): "hash_ids must be a list",
    line(hash_ids=[1, 2, -3]): "hash_ids must be a list",
    line(hash_ids=[1, 2, 1]): "comes twice",
    line(hash_ids=[1, 3, 4]): "id 3 follows id 1 here and id 2 before",
    line(hash_ids=[2, 8, 9]): "id 2 follows nothing here and id 1 before",
}


@pytest.mark.parametrize(("broken", "reason"), BROKEN.items(), ids=range(len(BROKEN)))
def test_a_broken_line_is_named_with_its_number_and_reason(broken: str, reason: str) -> None:
    lines = [line(), "", broken, line(timestamp=6)]
    with pytest.raises(TraceError, match=r"t\.jsonl, line 3: ") as caught:
        parse_mooncake(lines, "t.jsonl")
    assert reason in str(caught.value)
    trace = parse_mooncake(lines, "t.jsonl", skip_bad=True)
    assert trace.num_skipped == 1
    assert [request.timestamp_ms for request in trace.requests] == [5, 6]


def test_a_broken_line_teaches_no_parents() -> None:
    trace = parse_mooncake([line(hash_ids=[7, 8, 7]), line(hash_ids=[8, 7, 9])], "t", skip_bad=True)
    assert [request.hash_ids for request in trace.requests] == [(8, 7, 9)]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_mooncake(tmp_path / "none.jsonl")
