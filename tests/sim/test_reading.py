"""Whatever a trace file is, it is read or refused with a typed error that says where and why."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from anaphora.errors import TraceError
from anaphora.sim import lines
from anaphora.sim.reading import read_trace

EXCERPT = Path(__file__).parent / "traces" / "conversation_head.jsonl"
GOOD = b'{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'


def test_gzip_is_seen_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(EXCERPT.read_bytes()))
    assert read_trace(path).requests == read_trace(EXCERPT).requests


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (GOOD, gzip.compress(GOOD)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))
        trace = read_trace(Path("-"))
        assert (trace.name, len(trace.requests)) == ("stdin", 1)


def test_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(GOOD * 3,))
    writer.start()
    assert len(read_trace(path).requests) == 3
    writer.join()


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert len(read_trace(tmp_path / "t").requests) == 1


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(GOOD + GOOD.strip())
    assert len(read_trace(tmp_path / "t").requests) == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "has no requests"),
        (b"\n \n", "has no requests"),
        (b"\x7fELF\x02\x01\xff\xfe\n", "line 1: not UTF-8 text at byte 6"),
        (b"\x00\x01\x02", "line 1: not JSON"),
        (GOOD + b'{"timestamp": 0, "input_length": 5', "line 2: not JSON"),
        (GOOD + b"9" * 5000 + b"\n", "line 2: not JSON that a trace could hold: a number of thousands of digits"),
        (b'{"some": "object"}\n', "line 1: timestamp must be a number of milliseconds >= 0, got None"),
        (b'{"messages": []}\n', "line 1: this is a log of requests, not of block ids: give --tokenizer FOLDER"),
        (gzip.compress(GOOD * 100)[:-12], "cannot read the trace"),
        (gzip.compress(GOOD)[:12] + b"rubbish" * 9, "cannot read the trace"),
    ],
    ids=range(10),
)
def test_what_is_no_trace(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceError, match=reason):
        read_trace(tmp_path / "t")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*: Is a directory"):
        read_trace(tmp_path)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    (tmp_path / "t").write_bytes(GOOD + b"x" * 101)
    with pytest.raises(TraceError, match="line 2: longer than 100 bytes"):
        read_trace(tmp_path / "t", skip_bad=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"timestamp": 10**400}, "timestamp must be"),
        ({"timestamp": "0"}, "timestamp must be"),
        ({"input_length": True}, "input_length must be an integer >= 1, got True"),
        ({"input_length": 10**30}, "input_length must be at most 16,777,216, got 1000"),
        ({"output_length": 10**30}, "output_length must be at most 16,777,216, got 1000"),
        ({"output_length": False}, "output_length must be an integer >= 0, got False"),
        ({"output_length": 1.0}, "output_length must be an integer >= 0, got 1.0"),
        ({"hash_ids": [True]}, "hash_ids must be a list of integers"),
        ({"hash_ids": [2**64]}, "hash_ids must be a list of integers"),
        ({"hash_ids": None}, "hash_ids must be a list of integers"),
        ({"output_hash_ids": [2]}, "fill 0 blocks of 512 after the prompt's full ones, got 1"),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    entry = json.loads(GOOD) | changes
    (tmp_path / "t").write_text(GOOD.decode() + json.dumps(entry) + "\n" + GOOD.decode())
    with pytest.raises(TraceError, match=f"line 2: .*{reason}"):
        read_trace(tmp_path / "t")
    trace = read_trace(tmp_path / "t", skip_bad=True)
    assert (trace.num_skipped, len(trace.requests)) == (1, 2)
