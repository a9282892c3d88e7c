"""From lines to a trace, and what a broken line is called. Knows what all formats share, and no field of any."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

from anaphora.errors import ConfigError, TraceError
from anaphora.sim.trace import Trace, TraceRequest


class LineFormat(Protocol):
    """Understands one object a line. May keep what earlier lines said."""

    @property
    def block_size(self) -> int:
        """Tokens behind one id."""
        ...

    def parse(self, entry: dict[str, Any]) -> list[TraceRequest]:
        """The requests of one line. Raises ValueError with the reason, and keeps nothing, if it is broken.

        Raises TraceError if the whole file cannot be understood.
        """
        ...


def parse_lines(lines: Iterable[str | bytes], name: str, line_format: LineFormat, *, skip_bad: bool = False) -> Trace:
    """All requests, in the order of the lines. Empty lines are no requests and no errors.

    Raises TraceError with line number and reason; skip_bad counts broken lines instead. Raises ConfigError if a format
    lacks what it needs.
    """
    requests: list[TraceRequest] = []
    num_skipped = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests += line_format.parse(parse_object(line))
        except ConfigError:  # no fault of the line's
            raise
        except TraceError as error:  # the file as a whole is of no use
            raise TraceError(f"{name}, line {number}: {error}") from error
        except ValueError as error:
            if not skip_bad:
                raise TraceError(f"{name}, line {number}: {error} (--skip-bad leaves broken lines out)") from error
            num_skipped += 1
    return Trace(name, line_format.block_size, tuple(requests), num_skipped)


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        text = line if isinstance(line, str) else line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start}") from None
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that a trace could hold: nested too deeply") from None
    except ValueError:
        raise ValueError("not JSON that a trace could hold: a number of thousands of digits") from None
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, got {type(entry).__name__}")
    return entry


def check_not_empty(trace: Trace) -> Trace:
    """Raises TraceError where not one request is left."""
    if not trace.requests:
        skipped = f" ({trace.num_skipped:,} broken lines left out)" if trace.num_skipped else ""
        raise TraceError(f"the trace {trace.name} has no requests{skipped}")
    return trace
