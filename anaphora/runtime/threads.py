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
_Done = SimpleQueue[float | BaseException]
_Todo = SimpleQueue[tuple[Work, Callable[[], None], _Done] | None]


class ThreadTeam:
    """num_threads - 1 threads besides the caller's own.

    barrier: the memory in which they meet, int64; see anaphora.runtime.kernels.barrier.
    """

    def __init__(self, num_threads: int, barrier_size: int) -> None:
        self.num_threads = num_threads
        self.barrier = np.zeros(barrier_size + 8, dtype=np.int64)
        self._todo: list[_Todo] = [SimpleQueue() for _ in range(num_threads - 1)]
        for number, todo in enumerate(self._todo, start=1):
            threading.Thread(target=_serve, args=(number, todo), name=f"anaphora-step-{number}", daemon=True).start()
        weakref.finalize(self, _stop, self._todo)

    def run(self, work: Work, abandon: Callable[[], None], num_threads: int | None = None) -> float:
        """`work(number)` on the first `num_threads` threads (None: on all); returns when they have.

        abandon: called where a thread is lost before it could begin, so that the others do not wait for it.
        Returns the share of their time in which they had a core, in [0, 1] up to the clocks' resolution.
        """
        count = self.num_threads if num_threads is None else num_threads
        done: _Done = SimpleQueue()  # of this run alone: what an interrupted one leaves is nobody's
        begin_s, num_started = time.perf_counter(), 0
        try:
            for todo in self._todo[: count - 1]:
                todo.put((work, abandon, done))
                num_started += 1
            cpu_s = _timed(work, 0)
        except BaseException:
            abandon()
            for _ in range(num_started):
                done.get()
            self.barrier[:] = 0  # whoever waited has left
            raise
        for other in [done.get() for _ in range(count - 1)]:
            if isinstance(other, BaseException):
                self.barrier[:] = 0
                raise other
            cpu_s += other
        return cpu_s / (count * max(time.perf_counter() - begin_s, 1e-9))


def _timed(work: Work, number: int) -> float:
    """CPU seconds of this thread."""
    begin_s = time.thread_time()
    work(number)
    return time.thread_time() - begin_s


def _serve(number: int, todo: _Todo) -> None:
    while (order := todo.get()) is not None:
        work, abandon, done = order
        try:
            done.put(_timed(work, number))
        except BaseException as error:
            abandon()
            done.put(error)
        del order, work, abandon, done


def _stop(queues: list[_Todo]) -> None:
    for todo in queues:
        todo.put(None)
