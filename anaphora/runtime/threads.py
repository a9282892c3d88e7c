"""Threads that run one compiled function side by side, once per call, each with its own number.

Knows threads; knows nothing of the work. The function must let go of the interpreter's lock and bring its own barrier:
all of them run at the same time. Between calls the threads sleep.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

Work = Callable[[int], Any]


class ThreadTeam:
    """num_threads - 1 threads besides the caller's own.

    barrier: the memory in which they meet, int64; see anaphora.runtime.kernels.barrier.
    """

    def __init__(self, num_threads: int, barrier_size: int) -> None:
        self.num_threads = num_threads
        self.barrier = np.zeros(barrier_size + 8, dtype=np.int64)
        self._todo: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(num_threads - 1)]
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        for number, todo in enumerate(self._todo, start=1):
            threading.Thread(
                target=_serve, args=(number, todo, self._done), name=f"anaphora-step-{number}", daemon=True
            ).start()
        weakref.finalize(self, _stop, self._todo)

    def run(self, work: Work, abandon: Callable[[], None]) -> None:
        """`work(number)` on every thread; returns when all have.

        abandon: called if this thread is interrupted before it could begin, so that the others do not wait for it.
        """
        for todo in self._todo:
            todo.put(work)
        try:
            work(0)
        except BaseException:
            abandon()
            raise
        finally:
            failed = [error for error in (self._done.get() for _ in self._todo) if error is not None]
        if failed:
            raise failed[0]


def _serve(number: int, todo: SimpleQueue[Work | None], done: SimpleQueue[BaseException | None]) -> None:
    while (work := todo.get()) is not None:
        try:
            work(number)
            done.put(None)
        except BaseException as error:
            done.put(error)
        del work


def _stop(queues: list[SimpleQueue[Work | None]]) -> None:
    for todo in queues:
        todo.put(None)
