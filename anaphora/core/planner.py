"""What the next step computes: which requests, how many tokens of each, in which blocks.

Order. Running requests come first, in rank order, and each is owed at least one token, so that a long prompt never
stalls those who decode. Then waiting requests in rank order, until one does not fit: nobody overtakes it. When the pool
runs dry, the running request of the worst rank is preempted.

Followers. A request behind its tokens takes what is left of the budget, so nobody is admitted beside it, and those who
share its beginning find it later. With a `long_prefill_token_threshold` (the most tokens of one request in a step)
there is room beside it: whoever shares more with it than it has planned follows it instead of computing that again.

Knows budgets, and blocks only through the cache manager; must not know what comes of a step.
"""

from __future__ import annotations

from anaphora.core import accounting
from anaphora.core.cache_manager import CacheManager
from anaphora.core.hit import Hit
from anaphora.core.ids import RequestId, StateSlot
from anaphora.core.plan import Admission, ScheduledRequest
from anaphora.core.request import Request, RequestState
from anaphora.core.request_queues import RequestQueues
from anaphora.core.stats import Counters
from anaphora.core.step import InFlight, Step


class Planner:
    """max_request_tokens: the most tokens of one request in a step."""

    def __init__(
        self,
        cache: CacheManager,
        queues: RequestQueues,
        counters: Counters,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_request_tokens: int,
    ) -> None:
        self._cache = cache
        self._queues = queues
        self._counters = counters
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_request_tokens = max_request_tokens
        self._blocked: tuple[Request, int] | None = None  # who did not fit, and how many free blocks it needs

    def plan(self) -> Step:
        """Move requests and take blocks for one step; nothing is scheduled where no request can run."""
        step = Step(self._max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:  # what was just taken away is not given to someone else
            self._schedule_waiting(step)
        return step

    def _schedule_running(self, step: Step) -> None:
        running = self._queues.running
        index = 0
        while index < len(running):
            request = running[index]
            owed = len(running) - index - 1
            num_tokens = self._num_tokens(request, step.budget - owed)
            while not self._cache.grow(request, request.num_computed_tokens + num_tokens):
                step.preempted = True
                victim = running[-1]  # the worst rank: not scheduled yet
                self._queues.preempt(victim)
                if victim is request:
                    return
            self._put(step, request, num_tokens, set())
            index += 1

    def _schedule_waiting(self, step: Step) -> None:
        while step.budget > 0 and len(self._queues.running) < self._max_num_seqs:
            request = self._queues.first_waiting()
            if request is None or self._is_blocked(request):
                return
            request.enter(RequestState.LOOKING_UP)
            hit = self._cache.look_up(request)
            if leader := self._leader_of(step, request, hit):
                self._queues.follow_first(*leader)
                continue
            if not self._cache.admit(request, hit, self._max_request_tokens):
                self._blocked = request, self._cache.num_free_needed(request, hit, self._max_request_tokens)
                request.enter(RequestState.WAITING)
                return
            self._blocked = None  # what is live now may be shared by whoever was blocked
            self._admit_first(step, request, hit)

    def _admit_first(self, step: Step, request: Request, hit: Hit) -> None:
        """Schedule the first waiting request, which has just got its blocks."""
        self._queues.run_first()
        accounting.admitted(self._counters, request, hit.num_tokens)
        step.admitted.append(
            Admission(
                request.request_id,
                tuple(request.tokens),  # type: ignore[arg-type]
                request.num_prompt_tokens,
                request.sampling,
                request.seed,
                request.end_token_ids,
                request.adapter,
                request.features,
            )
        )
        num_tokens = self._num_tokens(request, step.budget)
        grown = self._cache.grow(request, hit.num_tokens + num_tokens)
        assert grown, "an admission asks for the room of its first chunk, too"
        self._put(step, request, num_tokens, step.writers(hit), self._cache.load_state(hit))

    def _num_tokens(self, request: Request, budget: int) -> int:
        """How many tokens of a request that has its hit this step computes."""
        behind = request.num_tokens - request.num_computed_tokens
        return self._cache.chunk(request, min(behind, self._max_request_tokens, budget))

    def _is_blocked(self, request: Request) -> bool:
        """Whether it did not fit before, and still cannot: looking up again is pointless."""
        if self._blocked is None:
            return False
        blocked, num_free_needed = self._blocked
        return blocked is request and num_free_needed > self._cache.num_available

    def _put(
        self,
        step: Step,
        request: Request,
        num_tokens: int,
        shares_with: set[RequestId],
        load_state: StateSlot | None = None,
    ) -> None:
        """Schedule num_tokens of a request that has the blocks for them."""
        start = request.num_computed_tokens
        stop = start + num_tokens
        sample = stop == request.num_tokens and request.sampling.max_tokens > 0
        staged = self._cache.stage(request, stop)
        step.scheduled.append(
            ScheduledRequest(
                request.request_id,
                start,
                tuple(request.tokens[start:stop]),  # type: ignore[arg-type]
                self._cache.take_new_block_ids(request),
                sample,
                load_state,
                staged.save_state,
            )
        )
        step.budget -= num_tokens
        if staged.blocks:
            step.note_writer(request.request_id, staged)
        step.in_flight[request.request_id] = InFlight(request, num_tokens, sample, staged, shares_with)
        if request.chain is not None:
            num_blocks = stop // self._cache.block_size
            step.frontier.add(request, num_blocks)
            self._queues.release_followers(request, num_blocks)

    def _leader_of(self, step: Step, request: Request, hit: Hit) -> tuple[Request, int] | None:
        """Whom it is cheaper to wait for, and how many leading blocks the two share; None if there is nobody."""
        if hit.awaits is not None:  # the state that it saves can be loaded in the next step
            leader = self._queues.get(hit.awaits)
            assert leader is not None, "it saves a state in this very step"
            return leader, 0
        found = step.frontier.leader_of(
            request, hit, self._cache.finder.max_hit_tokens(request) // self._cache.block_size
        )
        if found is not None:
            self._cache.expect_follower(*found)
        return found
