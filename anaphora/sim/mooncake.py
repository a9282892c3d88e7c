"""Mooncake's trace format: one JSON object a line with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

Source: github.com/kvcache-ai/Mooncake. Each id names 512 tokens and everything before them; the last one is partial
unless the length is a multiple of 512. What the engine records has the same fields behind a header line with the block
size, and `output_hash_ids`, `cached_tokens` and `arrival` besides (recorded.py). Knows the fields and what makes them
broken; must not know the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anaphora.core.ids import cdiv
from anaphora.sim.lines import read_lines, shown_name
from anaphora.sim.parsing import check_not_empty, parse_lines
from anaphora.sim.trace import Trace, TraceRequest

BLOCK_SIZE = 512
MAX_LENGTH = 1 << 24
MAX_TIMESTAMP_MS = 1e15
_MAX_ID = 1 << 64
_NO_PARENT = -1


def read_mooncake(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read a trace file, or standard input for `-`. Raises TraceError with line number and reason.

    skip_bad counts broken lines instead. A file without a request is an error too.
    """
    return check_not_empty(parse_mooncake(read_lines(path), shown_name(path), skip_bad=skip_bad))


def parse_mooncake(lines: Iterable[str | bytes], name: str, *, skip_bad: bool = False) -> Trace:
    """As read_mooncake, from lines."""
    return parse_lines(lines, name, MooncakeFormat(), skip_bad=skip_bad)


class MooncakeFormat:
    """See LineFormat. in_order: a line may not be earlier than the one before it."""

    def __init__(self, block_size: int = BLOCK_SIZE, *, in_order: bool = True) -> None:
        self.block_size = block_size
        self._in_order = in_order
        self._last_timestamp = 0.0
        self._parents: dict[int, int] = {}
        self._same: dict[int, int] = {}  # one object for equal ids: a trace repeats them, and they compare faster

    def parse(self, entry: dict[str, Any]) -> list[TraceRequest]:
        timestamp = read_timestamp(entry)
        if self._in_order and timestamp < self._last_timestamp:
            raise ValueError(f"time goes back: {timestamp!r} ms after {self._last_timestamp!r} ms")
        input_length = read_integer(entry, "input_length", 1, MAX_LENGTH)
        output_length = read_integer(entry, "output_length", 0, MAX_LENGTH)
        hash_ids = _ids(entry, "hash_ids")
        expected = cdiv(input_length, self.block_size)
        if len(hash_ids) != expected:
            raise ValueError(
                f"{input_length} input tokens take {expected} ids of {self.block_size}, got {len(hash_ids)}"
            )
        num_full = input_length // self.block_size
        output_ids = _ids(entry, "output_hash_ids") if "output_hash_ids" in entry else []
        request = TraceRequest(
            timestamp,
            input_length,
            output_length,
            tuple(self._shared(hash_ids)),
            tuple(self._shared(output_ids)),
            read_integer(entry, "cached_tokens", 0, input_length) if "cached_tokens" in entry else None,
        )
        expected = request.known_length // self.block_size - num_full
        if output_ids and len(output_ids) != expected:
            raise ValueError(
                f"{input_length} input and {output_length} output tokens fill {expected} blocks of {self.block_size} "
                f"after the prompt's full ones, got {len(output_ids)} output_hash_ids"
            )
        paths = [hash_ids] if not output_ids else [hash_ids, hash_ids[:num_full] + output_ids]
        for path in paths:
            self._check_path(path)
        for path in paths:
            self._parents.update(zip(path, [_NO_PARENT, *path], strict=False))
        self._last_timestamp = timestamp
        return [request]

    def _shared(self, ids: list[int]) -> Iterable[int]:
        same = self._same
        return [same.setdefault(block_id, block_id) for block_id in ids]

    def _check_path(self, ids: list[int]) -> None:
        """Raises ValueError if an id cannot name a whole beginning."""
        if len(set(ids)) < len(ids):
            raise ValueError("an id comes twice, but an id names the whole beginning up to its block")
        known, parent = self._parents, _NO_PARENT
        for block_id in ids:
            if known.get(block_id, parent) != parent:
                raise ValueError(
                    f"id {block_id} follows {_name(parent)} here and {_name(known[block_id])} before, "
                    "but an id names the whole beginning up to its block"
                )
            parent = block_id


def read_timestamp(entry: dict[str, Any]) -> float:
    """Milliseconds. Raises ValueError."""
    timestamp = entry.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp <= MAX_TIMESTAMP_MS:
        raise ValueError(f"timestamp must be a number of milliseconds >= 0, got {_shown(timestamp)}")
    return timestamp


def _ids(entry: dict[str, Any], field: str) -> list[int]:
    ids = entry.get(field)
    if not isinstance(ids, list) or not all(type(block_id) is int and 0 <= block_id < _MAX_ID for block_id in ids):
        raise ValueError(f"{field} must be a list of integers in [0, 2**64)")
    return ids


def read_integer(entry: dict[str, Any], field: str, low: int, high: int) -> int:
    """The integer in [low, high] that a field holds. Raises ValueError."""
    value = entry.get(field)
    if type(value) is not int or value < low:
        raise ValueError(f"{field} must be an integer >= {low}, got {_shown(value)}")
    if value > high:
        raise ValueError(f"{field} must be at most {high:,}, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _name(parent: int) -> str:
    return "nothing" if parent == _NO_PARENT else f"id {parent}"
