"""The requests that wait to be admitted, in rank order. Knows order only; must not know what admission takes."""

from __future__ import annotations

import heapq

from anaphora.core.request import Request

Rank = tuple[int, int]
"""(priority, arrival): the lower, the earlier."""


class WaitingQueue:
    """A heap. A request that ends while it waits is discarded in O(1): it stays in the heap until it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, rank: Rank, request: Request) -> None:
        """Ranks are unique among live requests."""
        heapq.heappush(self._heap, (rank, request))
        self._num_waiting += 1

    def first(self) -> Request | None:
        """The request whose turn it is; stays in the queue."""
        while self._heap:
            request = self._heap[0][1]
            if not request.is_finished:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Take out what `first` gave."""
        heapq.heappop(self._heap)
        self._num_waiting -= 1

    def discard(self) -> None:
        """One request of the queue has ended; its state says which."""
        self._num_waiting -= 1
