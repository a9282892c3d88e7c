"""How many threads a step gets, by how much of their time the system gave the steps before it.

Knows times and counts; knows nothing of the work and of threads. The threads of a step wait for each other some
hundred times, so one that has to share its core with somebody else holds up all of them, and fewer threads are the
faster ones. How many there are changes no result: who computes what does not change what is computed.
"""

from __future__ import annotations

LEAST_SHARE = 0.7
"""Of their time that threads with a core of their own get at least. One of two threads that gets half of its core makes
it 0.75, and two threads are still as fast as one."""

WEIGHT = 0.3
"""Of the latest step in the running mean, so that a single late step changes nothing."""

FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Steps with fewer threads until more are tried again; twice as many each time that it was too early."""


class Crowding:
    """num_threads: how many the next step gets, `most` at most."""

    def __init__(self, most: int) -> None:
        self.num_threads = self._most = most
        self._share = 1.0
        self._pause = FIRST_PAUSE
        self._left = 0  # steps until more threads are tried

    def note(self, share: float) -> None:
        """After a step of `num_threads`: the CPU time that they got over the time that they ran."""
        self._share += WEIGHT * (share - self._share)
        if self._share < LEAST_SHARE and self.num_threads > 1:
            self.num_threads //= 2
            self._share, self._left = 1.0, self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._left > 0:
            self._left -= 1
            if self._left == 0:
                self.num_threads = min(2 * self.num_threads, self._most)
                self._share = 1.0
                self._left = 0 if self.num_threads == self._most else self._pause
        elif min(share, self._share) > (1 + LEAST_SHARE) / 2:  # the mean alone is high whenever more are tried again
            self._pause = FIRST_PAUSE
