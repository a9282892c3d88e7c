"""Which requests are alive, and where each one stands: waiting, following or running.

    add ──▶ waiting ──▶ running ──▶ gone          preempt: running ──▶ waiting
               ▲ └──▶ following                   whoever runs no longer sends its followers back to waiting
               └───────────┘

Rank is (priority, arrival); `fcfs` ignores the priority. Knows order, and the cache only to give back what a request
held; must not know budgets, steps, or why a request is moved.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from anaphora.core import accounting
from anaphora.core.cache_manager import CacheManager
from anaphora.core.followers import Followers
from anaphora.core.ids import RequestId
from anaphora.core.request import Request, RequestState
from anaphora.core.stats import Counters
from anaphora.core.waiting_queue import Rank, WaitingQueue


class RequestQueues:
    """running: in rank order, the best rank first. Changed by the methods here only."""

    def __init__(self, cache: CacheManager, counters: Counters, *, by_priority: bool) -> None:
        self.running: list[Request] = []
        self._cache = cache
        self._counters = counters
        self._by_priority = by_priority
        self._alive: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue()
        self._followers = Followers()
        self._released: list[RequestId] = []
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._alive)

    def get(self, request_id: str) -> Request | None:
        """The live request of this id."""
        return self._alive.get(RequestId(request_id))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_following(self) -> int:
        return len(self._followers)

    @property
    def oldest_epoch(self) -> int | None:
        """What had been forgotten when the first chain of those who are alive was made; None if nobody is."""
        return min((request.epoch for request in self._alive.values()), default=None)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A new request waits behind all of its priority that came before. Its id must be nobody's."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._alive[request.request_id] = request
        self._enqueue(request)

    def first_waiting(self) -> Request | None:
        """Whose turn it is; stays where it is."""
        return self._waiting.first()

    def run_first(self) -> None:
        """`first_waiting` has got its blocks."""
        request = self._pop_first()
        request.enter(RequestState.RUNNING)
        insort(self.running, request, key=self._rank)

    def follow_first(self, leader: Request, num_shared_blocks: int) -> None:
        """`first_waiting` waits from now on until its leader has passed this many leading blocks."""
        request = self._pop_first()
        request.enter(RequestState.FOLLOWING)
        self._followers.add(request, leader, num_shared_blocks)

    def release_followers(self, leader: Request, num_blocks: int) -> None:
        """The leader passes this many leading blocks: whoever shares no more with it has its turn again."""
        for follower in self._followers.release(leader, num_blocks):
            self._enqueue(follower)

    def preempt(self, request: Request) -> None:
        """A running request gives its blocks back and waits again."""
        self._leave_running(request)
        accounting.preempted(self._counters, request)
        self._enqueue(request)

    def end(self, request: Request, reason: str) -> None:
        """It is alive no longer, wherever it stood."""
        if request.state is RequestState.RUNNING:
            self._leave_running(request)
        elif request.state is RequestState.FOLLOWING:
            self._followers.discard(request)
        else:
            self._waiting.discard()
        request.enter(RequestState.FINISHED)
        request.finish_reason = reason
        del self._alive[request.request_id]
        accounting.ended(self._counters, reason)

    # -- what an executor is still to be told --------------------------------------------------------------------------

    def take_released(self) -> tuple[RequestId, ...]:
        """Who has left `running` since the last call, in this order."""
        released, self._released = tuple(self._released), []
        return released

    def release_again(self, request_ids: tuple[RequestId, ...]) -> None:
        """Whether the executor heard of these, nobody knows: they come first in the next `take_released`."""
        self._released = list(dict.fromkeys((*request_ids, *self._released)))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _rank(self, request: Request) -> Rank:
        return (request.priority if self._by_priority else 0, request.arrival)

    def _enqueue(self, request: Request) -> None:
        request.enter(RequestState.WAITING)
        self._waiting.push(self._rank(request), request)

    def _pop_first(self) -> Request:
        request = self._waiting.first()
        assert request is not None, "nobody waits"
        self._waiting.pop()
        return request

    def _leave_running(self, request: Request) -> None:
        """Give its blocks back; whoever waited for its blocks looks again."""
        self.running.remove(request)
        self._cache.free(request)
        self._released.append(request.request_id)
        for follower in self._followers.release_all(request):
            self._enqueue(follower)

    def inconsistencies(self) -> list[str]:
        """Equations between requests, their states and block tables that do not hold. For tests."""
        broken = []
        running = {request.request_id for request in self.running}
        if running != self._cache.tables.keys():
            broken.append(f"running {sorted(running)}, but tables for {sorted(self._cache.tables)}")
        for request in self.running:
            num_blocks = len(self._cache.table(request.request_id))
            if not request.num_computed_tokens < request.num_tokens:
                broken.append(f"{request.request_id!r} runs and has nothing to compute")
            if num_blocks * self._cache.block_size < request.num_computed_tokens:
                broken.append(f"{request.request_id!r} has computed more than its {num_blocks} blocks hold")
        states = Counter(request.state for request in self._alive.values())
        for state, verb, number in (
            (RequestState.RUNNING, "run", len(self.running)),
            (RequestState.FOLLOWING, "follow", len(self._followers)),
            (RequestState.WAITING, "wait", len(self._waiting)),
        ):
            if states[state] != number:
                broken.append(f"{states[state]} requests say that they {verb}, {number} do")
        return broken
