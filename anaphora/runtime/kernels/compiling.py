"""How kernels are compiled, and found again on disk at the next start.

Numba files compiled code under the time stamp of the function's own file, and does not notice that a function which it
calls, or a piece of LLVM code, has changed in another one. Here the key takes in the text of every file in this folder.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

# NaN and infinity mean what they mean, as non-finite output is found by them; sums may be taken in any order.
FASTMATH = {"reassoc", "contract", "nsz"}


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Cache(FunctionCache):
    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _sources())


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first call with given types, without the interpreter's lock, and keep the code on disk."""
    dispatcher: Any = njit(nogil=True, fastmath=FASTMATH, error_model="numpy")(function)
    try:
        dispatcher._cache = _Cache(function)
    except RuntimeError:  # nowhere to write: every process compiles for itself
        return dispatcher
    return dispatcher
