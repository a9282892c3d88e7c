"""What the engine records (`--record`): Mooncake's fields behind a header, a line a request, in order of completion.

    {"format": "anaphora-trace", "version": 1, "block_size": 16}
    {"timestamp": 12.5, "input_length": 40, "output_length": 9, "hash_ids": [...], "output_hash_ids": [...],
     "cached_tokens": 32, "arrival": 7}

Knows the header and the order; must not know the recorder.
"""

from __future__ import annotations

from typing import Any

from anaphora.config import MAX_BLOCK_SIZE
from anaphora.engine.recorder import FORMAT, VERSION
from anaphora.errors import TraceError
from anaphora.sim.mooncake import MooncakeFormat, read_integer
from anaphora.sim.trace import TraceRequest

_MAX_ARRIVAL = 1 << 63


def is_header(entry: dict[str, Any]) -> bool:
    return "format" in entry


def header(block_size: int) -> dict[str, Any]:
    """The first line of a trace whose ids name `block_size` tokens each."""
    return {"format": FORMAT, "version": VERSION, "block_size": block_size}


class RecordedFormat(MooncakeFormat):
    """Lines behind a header. arrivals: of each request that was parsed, its place in the order of arrival.

    Raises TraceError for a header of another format or version.
    """

    def __init__(self, entry: dict[str, Any]) -> None:
        if entry.get("format") != FORMAT or entry.get("version") != VERSION:
            raise TraceError(
                f"the header says format {entry.get('format')!r}, version {entry.get('version')!r}; this program reads "
                f"{FORMAT!r}, version {VERSION}: replay it with the program that wrote it"
            )
        try:
            block_size = read_integer(entry, "block_size", 1, MAX_BLOCK_SIZE)
        except ValueError as error:
            raise TraceError(f"the header is broken: {error}") from error
        super().__init__(block_size, in_order=False)
        self.arrivals: list[int] = []

    def parse(self, entry: dict[str, Any]) -> list[TraceRequest]:
        if is_header(entry):
            raise TraceError("a second header: these are two recordings, replay them one by one")
        arrival = read_integer(entry, "arrival", 0, _MAX_ARRIVAL) if "arrival" in entry else len(self.arrivals)
        requests = super().parse(entry)
        self.arrivals.append(arrival)
        return requests

    def in_order_of_arrival(self, requests: tuple[TraceRequest, ...]) -> tuple[TraceRequest, ...]:
        """By time, and requests of one time as they came to the engine."""
        numbered = zip((request.timestamp_ms for request in requests), self.arrivals, range(len(requests)), strict=True)
        return tuple(requests[number] for _, _, number in sorted(numbered))
