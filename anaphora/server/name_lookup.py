"""Names of hosts to addresses, with a limit of time that the system's resolver does not have.

Knows threads and the resolver; must not know HTTP, or which addresses are allowed.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable

MAX_PENDING = 16
"""Look-ups of one server at a time. A resolver may take half a minute over a name, and nothing ends it before."""

Resolve = Callable[[str, int], list[str]]
"""A host and a port to all its addresses. Raises OSError, UnicodeError."""


def resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class NameLookup:
    """Look-ups on threads of their own. One whose caller gave up runs on: max_pending is for those, too."""

    def __init__(self, resolve: Resolve = resolve, *, max_pending: int = MAX_PENDING) -> None:
        self._resolve = resolve
        self._room = threading.BoundedSemaphore(max_pending)

    def find(self, host: str, port: int, timeout_s: float) -> list[str]:
        """All addresses. Raises TimeoutError, also where there was no room so long, and what the resolver raises."""
        until = time.monotonic() + timeout_s
        if not self._room.acquire(timeout=timeout_s):
            raise TimeoutError(f"{host}: too many names are being looked up")
        outcome: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

        def look() -> None:
            try:
                found: list[str] | Exception = self._resolve(host, port)
            except Exception as error:  # whatever it is, it is for who waits
                found = error
            self._room.release()
            outcome.put(found)

        try:
            threading.Thread(target=look, name="anaphora-names", daemon=True).start()
        except BaseException:
            self._room.release()
            raise
        try:
            found = outcome.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"{host}: its name was not found in time") from None
        if isinstance(found, Exception):
            raise found
        return found
