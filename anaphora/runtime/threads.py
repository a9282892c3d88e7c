"""Threads that run one compiled function side by side, once per call, each with its own number.

Knows threads and their clocks; knows nothing of the work. The function must let go of the interpreter's lock and bring
its own barrier: all of them run at the same time. Between calls the threads sleep.
"""

from __future__ import annotations

import threading
import time
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
        self._done: SimpleQueue[float | BaseException] = SimpleQueue()
        for number, todo in enumerate(self._todo, start=1):
            threading.Thread(
                target=_serve, args=(number, todo, self._done), name=f"anaphora-step-{number}", daemon=True
            ).start()
        weakref.finalize(self, _stop, self._todo)

    def run(self, work: Work, abandon: Callable[[], None], num_threads: int | None = None) -> float:
        """`work(number)` on the first `num_threads` threads (None: on all); returns when they have.

        abandon: called if this thread is interrupted before it could begin, so that the others do not wait for it.
        Returns the share of their time in which they had a core, in [0, 1] up to the clocks' resolution.
        """
        count = self.num_threads if num_threads is None else num_threads
        begin_s = time.perf_counter()
        for todo in self._todo[: count - 1]:
            todo.put(work)
        try:
            cpu_s = _timed(work, 0)
        except BaseException:
            abandon()
            raise
        finally:
            others = [self._done.get() for _ in range(count - 1)]
        for other in others:
            if isinstance(other, BaseException):
                raise other
            cpu_s += other
        return cpu_s / (count * max(time.perf_counter() - begin_s, 1e-9))


def _timed(work: Work, number: int) -> float:
    """CPU seconds of this thread."""
    begin_s = time.thread_time()
    work(number)
    return time.thread_time() - begin_s


def _serve(number: int, todo: SimpleQueue[Work | None], done: SimpleQueue[float | BaseException]) -> None:
    while (work := todo.get()) is not None:
        try:
            done.put(_timed(work, number))
        except BaseException as error:
            done.put(error)
        del work


def _stop(queues: list[SimpleQueue[Work | None]]) -> None:
    for todo in queues:
        todo.put(None)
