"""Mooncake's trace format: one JSON object a line with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

Source: github.com/kvcache-ai/Mooncake. Each id names 512 tokens and everything before them; the last one is partial
unless the length is a multiple of 512. Knows the format and what makes a line broken; must not know the simulator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anaphora.core.ids import cdiv
from anaphora.errors import TraceError
from anaphora.sim.trace import Trace, TraceRequest

BLOCK_SIZE = 512
_NO_PARENT = -1


def read_mooncake(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read a trace file. Raises TraceError with line number and reason; skip_bad counts broken lines instead.

    A file without a request is an error too.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            trace = parse_mooncake(lines, str(path), skip_bad=skip_bad)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from error
    if not trace.requests:
        skipped = f" ({trace.num_skipped:,} broken lines left out)" if trace.num_skipped else ""
        raise TraceError(f"the trace {path} has no requests{skipped}")
    return trace


def parse_mooncake(lines: Iterable[str], name: str, *, skip_bad: bool = False) -> Trace:
    """As read_mooncake, from lines. Empty lines are no requests and no errors."""
    parents: dict[int, int] = {}
    requests: list[TraceRequest] = []
    num_skipped = 0
    last_timestamp = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = _parse_line(line, parents, last_timestamp)
        except ValueError as error:
            if not skip_bad:
                raise TraceError(f"{name}, line {number}: {error} (--skip-bad leaves broken lines out)") from error
            num_skipped += 1
            continue
        last_timestamp = request.timestamp_ms
        requests.append(request)
    return Trace(name, BLOCK_SIZE, tuple(requests), num_skipped)


def _parse_line(line: str, parents: dict[int, int], last_timestamp: float) -> TraceRequest:
    """One request; notes the parents of ids that are new. Raises ValueError, and notes nothing, if it is broken."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that a trace could hold: nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, got {type(entry).__name__}")
    timestamp = entry.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < float("inf"):
        raise ValueError(f"timestamp must be a number of milliseconds >= 0, got {timestamp!r}")
    if timestamp < last_timestamp:
        raise ValueError(f"time goes back: {timestamp!r} ms after {last_timestamp!r} ms")
    input_length = _length(entry, "input_length", 1)
    output_length = _length(entry, "output_length", 0)
    hash_ids = entry.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(block_id) is int and block_id >= 0 for block_id in hash_ids):
        raise ValueError("hash_ids must be a list of integers >= 0")
    expected = cdiv(input_length, BLOCK_SIZE)
    if len(hash_ids) != expected:
        raise ValueError(f"{input_length} input tokens take {expected} ids of {BLOCK_SIZE}, got {len(hash_ids)}")
    if len(set(hash_ids)) < len(hash_ids):
        raise ValueError("an id comes twice, but an id names the whole beginning up to its block")
    parent = _NO_PARENT
    for block_id in hash_ids:
        if parents.get(block_id, parent) != parent:
            raise ValueError(
                f"id {block_id} follows {_name(parent)} here and {_name(parents[block_id])} before, "
                "but an id names the whole beginning up to its block"
            )
        parent = block_id
    parent = _NO_PARENT
    for block_id in hash_ids:
        parents[block_id] = parent
        parent = block_id
    return TraceRequest(timestamp, input_length, output_length, tuple(hash_ids))


def _name(parent: int) -> str:
    return "nothing" if parent == _NO_PARENT else f"id {parent}"


def _length(entry: dict[str, Any], field: str, low: int) -> int:
    value = entry.get(field)
    if type(value) is not int or value < low:
        raise ValueError(f"{field} must be an integer >= {low}, got {value!r}")
    return value
