"""Writes a trace in Mooncake's format, behind our header line where ids do not name 512 tokens. Knows the fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anaphora.errors import TraceError
from anaphora.sim import mooncake
from anaphora.sim.recorded import header
from anaphora.sim.trace import Trace, TraceRequest


def write_trace(trace: Trace, path: Path) -> None:
    """One line a request; `read_trace` gives the same requests again. Raises TraceError."""
    lines: list[dict[str, Any]] = [_entry(request) for request in trace.requests]
    if trace.block_size != mooncake.BLOCK_SIZE:
        lines.insert(0, header(trace.block_size))
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    except OSError as error:
        raise TraceError(f"cannot write the trace {path}: {error.strerror or error}") from error


def _entry(request: TraceRequest) -> dict[str, Any]:
    entry = {
        "timestamp": request.timestamp_ms,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": request.hash_ids,
    }
    if request.output_hash_ids:
        entry["output_hash_ids"] = request.output_hash_ids
    if request.num_cached_tokens is not None:
        entry["cached_tokens"] = request.num_cached_tokens
    return entry
