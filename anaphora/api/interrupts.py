"""Ctrl-C at a safe moment. Knows signals only.

Python raises KeyboardInterrupt between any two instructions, also in the middle of the bookkeeping of a step, which
no clean-up behind it could put right. So while a step runs the signal waits for its end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C inside the body at its end; a second Ctrl-C does not wait.

    Without effect outside the main thread, which alone gets signals, and where the program has a SIGINT handler of its
    own: then that one decides.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    arrived = False

    def hold(signum: int, frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived:
            raise KeyboardInterrupt
        arrived = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt
