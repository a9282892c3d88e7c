"""Reads any trace: the first object of a file says which format it is.

    first object                        format
    {"format": "anaphora-trace", ...}   recorded by the engine
    {"hash_ids": ...}                   Mooncake's
    {"messages" | "prompt" | "body"}    request log in OpenAI's style, which needs a tokenizer

Knows the formats by name; must not know their fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anaphora.engine.protocols import Tokenizer
from anaphora.errors import TraceError
from anaphora.sim.lines import read_lines, shown_name
from anaphora.sim.mooncake import MooncakeFormat
from anaphora.sim.parsing import LineFormat, check_not_empty, parse_lines
from anaphora.sim.recorded import RecordedFormat, is_header
from anaphora.sim.request_log import DEFAULT_BLOCK_SIZE, RequestLogFormat
from anaphora.sim.trace import Trace, TraceRequest

_LOG_FIELDS = ("messages", "prompt", "body", "request")


def read_trace(
    path: Path,
    *,
    skip_bad: bool = False,
    load_tokenizer: Callable[[], Tokenizer] | None = None,
    log_block_size: int = DEFAULT_BLOCK_SIZE,
) -> Trace:
    """Read a trace of any format; `-` is standard input, gzip is seen by itself.

    load_tokenizer, log_block_size: for a request log; the size is that behind its ids. skip_bad: count broken lines
    instead of stopping at the first. Raises TraceError with line number and reason, or because no request is left.
    """
    chosen = _Chosen(load_tokenizer, log_block_size)
    trace = parse_lines(read_lines(path), shown_name(path), chosen, skip_bad=skip_bad)
    if isinstance(chosen.format, RecordedFormat):
        trace = dataclasses.replace(trace, requests=chosen.format.in_order_of_arrival(tuple(trace.requests)))
    return check_not_empty(trace)


class _Chosen:
    """The format that the first object asks for. See LineFormat."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer] | None, log_block_size: int) -> None:
        self.format: LineFormat | None = None
        self._load_tokenizer = load_tokenizer
        self._log_block_size = log_block_size

    @property
    def block_size(self) -> int:
        return self._log_block_size if self.format is None else self.format.block_size

    def parse(self, entry: dict[str, Any]) -> list[TraceRequest]:
        if self.format is None:
            if is_header(entry):
                self.format = RecordedFormat(entry)
                return []
            self.format = self._without_header(entry)
        return self.format.parse(entry)

    def _without_header(self, entry: dict[str, Any]) -> LineFormat:
        if "hash_ids" in entry or not any(field in entry for field in _LOG_FIELDS):
            return MooncakeFormat()
        if self._load_tokenizer is None:
            raise TraceError("this is a log of requests, not of block ids: give --tokenizer FOLDER")
        return RequestLogFormat(self._load_tokenizer(), self._log_block_size)
