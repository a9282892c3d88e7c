"""Where the commands write: results on stdout, everything else on stderr. Knows rich and the standard streams, and in
which words the command line speaks of options.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from anaphora.cli.flags import in_flags

_AS_IT_IS: Any = {"markup": False, "emoji": False, "highlight": False}
"""No text is read for signs: not for markup, and not for `:-1:`, which rich takes for a thumb."""


def stdout() -> Console:
    """For results. What a model or a user wrote is printed as it is."""
    return Console(**_AS_IT_IS, soft_wrap=True)


def tables() -> Console:
    """For tables on stdout. A pipe or file has no width: tables there are not squeezed into 80 columns."""
    console = Console(**_AS_IT_IS)
    return console if console.is_terminal else Console(**_AS_IT_IS, width=120)


def stderr() -> Console:
    """For progress, logs and errors."""
    return Console(**_AS_IT_IS, stderr=True, soft_wrap=True)


def print_error(error: Exception, command: Any = None) -> None:
    """One line on stderr, with what was noted on the error on its way. command: whose options it may be about."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    message = " ".join(f"{error}{notes}".split()) or type(error).__name__
    if command is not None:
        message = in_flags(message, command)
    stderr().print(f"error: {message}", style="red")


@contextlib.contextmanager
def only_json() -> Iterator[None]:
    """Whatever the body prints goes to stderr, so that stdout stays free for one document."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(document: Any) -> None:
    """One JSON document on stdout. Infinities and NaN, which JSON lacks, become null."""
    sys.stdout.write(json.dumps(_finite(document), ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
