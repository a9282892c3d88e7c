"""Regular expressions of strangers, matched where they can do no harm: in a process of their own, with an end.

An expression of a few characters can keep Python's `re` busy for years, and nothing can interrupt it. Knows expressions
and texts; must not know what either of them means.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from anaphora.errors import AdapterFileError, UnsupportedAdapterError

MAX_CHARS = 4096
MAX_EXPRESSIONS = 4096
_MAX_CPU_S = 2
_MAX_WAIT_S = 60.0  # of a machine that is so busy that it does not give the process its seconds
_MAX_MEMORY_BYTES = 1 << 30

_PROGRAM = f"""
import json, re, sys
try:
    import resource
except ImportError:
    pass
else:
    resource.setrlimit(resource.RLIMIT_CPU, ({_MAX_CPU_S}, {_MAX_CPU_S}))
    resource.setrlimit(resource.RLIMIT_AS, ({_MAX_MEMORY_BYTES}, {_MAX_MEMORY_BYTES}))
expressions, texts = json.load(sys.stdin)
compiled = map(re.compile, expressions)
json.dump([[i for i, text in enumerate(texts) if one.fullmatch(text)] for one in compiled], sys.stdout)
"""


def check_expression(name: str, expression: str) -> None:
    """name: of the setting that holds it. Raises AdapterFileError."""
    if len(expression) > MAX_CHARS:
        raise AdapterFileError(
            f"{name} has an expression of {len(expression):,} characters, at most {MAX_CHARS:,} may be"
        )
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterFileError(f"{name} is not a regular expression: {error}") from error


def match_all(expressions: Sequence[str], texts: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Of each expression, the texts that it is the whole of. Slow: starts a process, unless there is no expression.

    Raises UnsupportedAdapterError if it takes more than some seconds.
    """
    if not expressions:
        return {}
    if len(expressions) > MAX_EXPRESSIONS:
        raise UnsupportedAdapterError(f"it has {len(expressions):,} patterns, at most {MAX_EXPRESSIONS:,} may be")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([list(expressions), list(texts)]).encode(),
            capture_output=True,
            timeout=_MAX_WAIT_S,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        raise UnsupportedAdapterError(
            f"its expressions take more than {_MAX_CPU_S} s to match: name the layers in a list"
        ) from None
    return {
        expression: frozenset(texts[index] for index in found)
        for expression, found in zip(expressions, json.loads(done.stdout), strict=True)
    }
