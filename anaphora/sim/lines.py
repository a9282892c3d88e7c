"""Lines of a file, of a gzip'd one, or of standard input. Knows bytes and files; must not know what a line means."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from anaphora.errors import TraceError

STDIN = Path("-")
MAX_LINE_BYTES = 64 << 20
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def shown_name(path: Path) -> str:
    """What messages and tables call it."""
    return "stdin" if path == STDIN else str(path)


def read_lines(path: Path) -> Iterator[bytes]:
    """One line after the other, however large the file: `-` is standard input, and gzip is seen by its first bytes.

    Raises TraceError for what cannot be read and for a line of more than MAX_LINE_BYTES.
    """
    name = shown_name(path)
    try:
        with _opened(path) as raw:
            is_gzip = raw.peek(2)[:2] == _GZIP  # type: ignore[attr-defined]
            stream: BinaryIO = gzip.GzipFile(fileobj=raw) if is_gzip else raw  # type: ignore[assignment]
            line = stream.readline(MAX_LINE_BYTES + 1).removeprefix(_BYTE_ORDER_MARK)
            number = 1
            while line:
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{name}, line {number}: longer than {MAX_LINE_BYTES:,} bytes: this is no trace")
                yield line
                line = stream.readline(MAX_LINE_BYTES + 1)
                number += 1
    except (OSError, EOFError, zlib.error) as error:  # gzip has three ways to say that a file is broken
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot read the trace {name}: {reason}") from error


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb")
