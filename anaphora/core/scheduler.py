"""Who computes what in the next step. There are no phases: each request has tokens, and computed tokens that catch up.

`schedule()` gives a plan, `update()` or `fail()` takes its outcome; at most one plan is in flight. Knows requests,
budgets and order; blocks only through the cache manager. No clock, no thread, no randomness: the same calls give the
same plans.

Order. Rank is (priority, arrival); `fcfs` ignores the priority. Running requests come first, in rank order, and each is
owed at least one token, so that a long prompt never stalls those who decode. Then waiting requests in rank order, until
one does not fit: nobody overtakes it. When the pool runs dry, the running request of the worst rank is preempted.

Followers. A request behind its tokens takes what is left of the budget, so nobody is admitted beside it, and those who
share its beginning find it later. With a `long_prefill_token_threshold` (the most tokens of one request in a step)
there is room beside it: whoever shares more with it than it has planned follows it instead of computing that again.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from anaphora.config import SCHEDULING_POLICIES
from anaphora.core import accounting, limits
from anaphora.core.cache_manager import CacheManager
from anaphora.core.followers import Followers
from anaphora.core.hashing import ExtraKey
from anaphora.core.hit import Hit
from anaphora.core.ids import RequestId, StateSlot
from anaphora.core.plan import Admission, SampledToken, ScheduledRequest, StepPlan, StepResult
from anaphora.core.request import Request, RequestState
from anaphora.core.stats import Counters, Gauges, Stats
from anaphora.core.step import InFlight, Step
from anaphora.core.waiting_queue import Rank, WaitingQueue
from anaphora.errors import ConfigError, DuplicateRequestError, UnknownRequestError


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What a step did to one request: a token, an end, both, or neither (a chunk of its prompt)."""

    request: Request
    token: SampledToken | None = None
    finish_reason: str | None = None
    error: str | None = None


class Scheduler:
    """See the module. Raises ConfigError."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        policy: str = "fcfs",
        long_prefill_token_threshold: int | None = None,
    ) -> None:
        if max_num_batched_tokens < 1 or max_num_seqs < 1:
            raise ConfigError("max_num_batched_tokens and max_num_seqs must be at least 1")
        if long_prefill_token_threshold is not None and long_prefill_token_threshold < 1:
            raise ConfigError("long_prefill_token_threshold must be at least 1, or None for no limit of its own")
        if policy not in SCHEDULING_POLICIES:
            raise ConfigError(f"scheduling policy must be one of {', '.join(SCHEDULING_POLICIES)}, got {policy!r}")
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each running request is owed a token a step
        self.max_model_len = max_model_len
        self._by_priority = policy == "priority"
        self._max_chunk = long_prefill_token_threshold or max_num_batched_tokens
        self._requests: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # in rank order
        self._followers = Followers()
        self._blocked: tuple[Request, int] | None = None  # who did not fit, and how many free blocks it needs
        self._released: list[RequestId] = []
        self._in_flight: dict[RequestId, InFlight] | None = None
        self._ended_in_flight: dict[RequestId, str] = {}
        self._num_arrivals = 0
        self._counters = Counters()

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLongError or DuplicateRequestError; then nothing of it is kept."""
        if request.request_id in self._requests:
            raise DuplicateRequestError(f"request {request.request_id!r} is alive already; choose another id")
        self.check_fits(request.num_prompt_tokens)
        self.cache.register(request)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._enqueue(request)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Refuse at once what can never run, whatever is cached. Raises PromptTooLongError."""
        limits.check_fits(num_prompt_tokens, self.max_model_len, self.cache)

    def finish(self, request_id: str, reason: str) -> None:
        """End a live request from outside (`stop`, `abort`). While a step is in flight it ends with that step.

        Raises UnknownRequestError.
        """
        request = self._requests.get(RequestId(request_id))
        if request is None:
            raise UnknownRequestError(f"no live request has the id {request_id!r}; it may have finished already")
        if self._in_flight is not None and request.request_id in self._in_flight:
            self._ended_in_flight[request.request_id] = reason
        else:
            self._end(request, reason)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def _rank(self, request: Request) -> Rank:
        return (request.priority if self._by_priority else 0, request.arrival)

    def _enqueue(self, request: Request) -> None:
        request.enter(RequestState.WAITING)
        self._waiting.push(self._rank(request), request)

    def _leave_running(self, request: Request) -> None:
        """Give its blocks back; whoever waited for its blocks looks again."""
        self._running.remove(request)
        self.cache.free(request)
        self._released.append(request.request_id)
        for follower in self._followers.release_all(request):
            self._enqueue(follower)

    def _end(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self._leave_running(request)
        elif request.state is RequestState.FOLLOWING:
            self._followers.discard(request)
        else:
            self._waiting.discard()
        request.enter(RequestState.FINISHED)
        request.finish_reason = reason
        del self._requests[request.request_id]
        accounting.ended(self._counters, reason)

    def _preempt(self, request: Request) -> None:
        self._leave_running(request)
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._enqueue(request)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> StepPlan | None:
        """Plan the next step; None if no request can run. The caller then owes `update` or `fail`.

        now_s: by any clock that does not go back; pins of cached blocks begin and end by it, and nothing else.
        """
        assert self._in_flight is None, "update() or fail() comes before the next schedule()"
        self.cache.pass_time(now_s)
        step = Step(self.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:  # what was just taken away is not given to someone else
            self._schedule_waiting(step)
        if not step.scheduled:
            return None
        self._in_flight = step.in_flight
        self._counters.num_steps += 1
        released, self._released = tuple(self._released), []
        return StepPlan(self._counters.num_steps, released, tuple(step.admitted), tuple(step.scheduled))

    def _schedule_running(self, step: Step) -> None:
        index = 0
        while index < len(self._running):
            request = self._running[index]
            owed = len(self._running) - index - 1
            num_tokens = self._chunk(request, step.budget - owed)
            while not self.cache.grow(request, request.num_computed_tokens + num_tokens):
                step.preempted = True
                victim = self._running[-1]  # the worst rank: not scheduled yet
                self._preempt(victim)
                if victim is request:
                    return
            self._put(step, request, num_tokens, set())
            index += 1

    def _schedule_waiting(self, step: Step) -> None:
        while step.budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting.first()
            if request is None:
                return
            if self._is_blocked(request):
                return
            request.enter(RequestState.LOOKING_UP)
            hit = self.cache.look_up(request)
            if leader := self._leader_of(step, request, hit):
                self._waiting.pop()
                request.enter(RequestState.FOLLOWING)
                self._followers.add(request, *leader)
                continue
            if not self.cache.admit(request, hit, self._max_chunk):
                self._blocked = request, self.cache.num_free_needed(request, hit, self._max_chunk)
                request.enter(RequestState.WAITING)
                return
            self._blocked = None  # what is live now may be shared by whoever was blocked
            self._waiting.pop()
            request.enter(RequestState.RUNNING)
            insort(self._running, request, key=self._rank)
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
            num_tokens = self._chunk(request, step.budget)
            grown = self.cache.grow(request, hit.num_tokens + num_tokens)
            assert grown, "an admission asks for the room of its first chunk, too"
            self._put(step, request, num_tokens, step.writers(hit), self.cache.load_state(hit))

    def _chunk(self, request: Request, budget: int) -> int:
        """How many tokens of a request that has its hit this step computes."""
        behind = request.num_tokens - request.num_computed_tokens
        return self.cache.chunk(request, min(behind, self._max_chunk, budget))

    def _is_blocked(self, request: Request) -> bool:
        """Whether it did not fit before, and still cannot: looking up again is pointless."""
        if self._blocked is None:
            return False
        blocked, num_free_needed = self._blocked
        return blocked is request and num_free_needed > self.cache.num_available

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
        staged = self.cache.stage(request, stop)
        step.scheduled.append(
            ScheduledRequest(
                request.request_id,
                start,
                tuple(request.tokens[start:stop]),  # type: ignore[arg-type]
                self.cache.take_new_block_ids(request),
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
            num_blocks = stop // self.cache.block_size
            step.frontier.add(request, num_blocks)
            for follower in self._followers.release(request, num_blocks):
                self._enqueue(follower)

    def _leader_of(self, step: Step, request: Request, hit: Hit) -> tuple[Request, int] | None:
        """Whom it is cheaper to wait for, and how many leading blocks the two share; None if there is nobody."""
        if hit.awaits is not None:  # the state that it saves can be loaded in the next step
            return self._requests[hit.awaits], 0
        found = step.frontier.leader_of(request, hit, self.cache.max_hit_tokens(request) // self.cache.block_size)
        if found is not None:
            self.cache.expect_follower(*found)
        return found

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take the outcome of the plan in flight: commit what was written, append what was sampled, end what is done.

        A request that failed takes those with it that read blocks it was to write in this step.
        """
        in_flight = self._take_in_flight(plan)
        failed = dict(result.failed)
        for request_id, entry in in_flight.items():  # a writer comes before its readers
            if entry.sample and not any(request_id in each for each in (result.sampled, result.unsampled, failed)):
                failed[request_id] = "the executor gave neither a token nor an error"
            if request_id not in failed and (culprits := entry.shares_with & failed.keys()):
                failed[request_id] = f"it shares blocks of this step with {min(culprits)}: {failed[min(culprits)]}"
        self._withdraw(entry for request_id, entry in in_flight.items() if request_id in failed)
        updates = []
        for request_id, entry in in_flight.items():
            if request_id in failed:
                updates.append(self._fail_request(entry.request, failed[request_id]))
                continue
            accounting.computed(self._counters, entry.request, entry.num_tokens)
            self.cache.commit(entry.staged)
            self.cache.give_back(entry.request)
            if request_id in result.unsampled:
                updates.append(self._fail_request(entry.request, result.unsampled[request_id]))
            else:
                updates.append(self._advance(entry.request, result.sampled[request_id] if entry.sample else None))
        return updates

    def fail(self, plan: StepPlan, reason: str) -> list[RequestUpdate]:
        """The plan in flight did not run to its end: nothing it wrote counts, and its requests end with an error."""
        in_flight = self._take_in_flight(plan)
        self._counters.num_failed_steps += 1
        self._withdraw(in_flight.values())
        updates = [self._fail_request(entry.request, reason) for entry in in_flight.values()]
        # Whether the executor came to release them, nobody knows.
        self._released = list(dict.fromkeys((*plan.released, *self._released)))
        return updates

    def _take_in_flight(self, plan: StepPlan) -> dict[RequestId, InFlight]:
        assert self._in_flight is not None, "there is no plan in flight"
        assert plan.step == self._counters.num_steps, "this is not the plan in flight"
        in_flight, self._in_flight = self._in_flight, None
        return in_flight

    def _withdraw(self, entries: Iterable[InFlight]) -> None:
        """Every pending entry goes before any block is freed: a failed request may read a block that another wrote."""
        for entry in entries:
            self.cache.withdraw(entry.staged)

    def _fail_request(self, request: Request, reason: str) -> RequestUpdate:
        self._ended_in_flight.pop(request.request_id, None)
        self._end(request, "error")
        return RequestUpdate(request, finish_reason="error", error=reason)

    def _advance(self, request: Request, token: SampledToken | None) -> RequestUpdate:
        reason = self._ended_in_flight.pop(request.request_id, None)
        if reason is not None:
            token = None
        elif token is not None:
            request.append(token.token_id)
            self._counters.num_generated_tokens += 1
            reason = limits.finish_reason(request, token.token_id, self.max_model_len, self.cache)
        elif request.sampling.max_tokens == 0 and request.num_computed_tokens == request.num_tokens:
            reason = "length"  # the prompt is scored
        if reason is not None:
            self._end(request, reason)
        return RequestUpdate(request, token, reason)

    # -- the cache as a whole ------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget everything cached. False, and no effect, while requests hold blocks or a step is in flight.

        preempt_running: give up the running requests' blocks first; they queue again and compute everything anew.
        """
        if self._in_flight is not None or (self._running and not preempt_running):
            return False
        for request in reversed(self._running[:]):
            self._preempt(request)
        return self.cache.reset()

    def forget(self, key: ExtraKey) -> None:
        """No later request finds blocks of this salt or adapter. O(1); those that are alive go on as they are."""
        self.cache.chains.scopes.forget(key)

    def forget_prefix(self, tokens: array[int], extra_keys: Sequence[ExtraKey]) -> int:
        """See CacheManager.forget_prefix. Requests that are alive go on as they are."""
        oldest = min((request.epoch for request in self._requests.values()), default=None)
        return self.cache.forget_prefix(tokens, extra_keys, oldest)

    def stats(self) -> Stats:
        """A snapshot; two of them give a delta."""
        pool, index, checkpoints = self.cache.pool, self.cache.spine.index, self.cache.checkpoints
        gauges = Gauges(
            num_total_blocks=pool.num_blocks,
            num_live_blocks=pool.num_live,
            num_cached_blocks=pool.free_queue.num_cached,
            num_blank_blocks=pool.free_queue.num_blank,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_following=len(self._followers),
            num_pinned_blocks=self.cache.spine.pins.num_pinned,
            num_checkpoints=0 if checkpoints is None else len(checkpoints),
            num_state_slots=0 if checkpoints is None else checkpoints.num_slots,
        )
        counters = replace(
            self._counters,
            num_committed_blocks=index.num_committed,
            num_duplicate_blocks=index.num_duplicates,
            num_collisions=index.num_collisions,
            num_evicted_blocks=pool.num_evicted,
        )
        what_if = () if self.cache.what_if is None else self.cache.what_if.curve()
        return Stats(counters, gauges, self.cache.group_gauges(), what_if)

    def inconsistencies(self) -> list[str]:
        """Equations between requests and block tables that do not hold. For tests."""
        broken = []
        running = {request.request_id for request in self._running}
        if running != self.cache.tables.keys():
            broken.append(f"running {sorted(running)}, but tables for {sorted(self.cache.tables)}")
        if self._in_flight is None and self.cache.num_pending:
            broken.append(f"{self.cache.num_pending} blocks or checkpoints are pending between steps")
        for request in self._running:
            num_blocks = len(self.cache.table(request.request_id))
            if not request.num_computed_tokens < request.num_tokens:
                broken.append(f"{request.request_id!r} runs and has nothing to compute")
            if num_blocks * self.cache.block_size < request.num_computed_tokens:
                broken.append(f"{request.request_id!r} has computed more than its {num_blocks} blocks hold")
        states = Counter(request.state for request in self._requests.values())
        if states[RequestState.RUNNING] != len(self._running) or len(self._running) > self.max_num_seqs:
            broken.append(f"{states[RequestState.RUNNING]} requests say that they run, {len(self._running)} do")
        if states[RequestState.FOLLOWING] != len(self._followers):
            broken.append(f"{states[RequestState.FOLLOWING]} requests say that they follow, {len(self._followers)} do")
        if states[RequestState.WAITING] != len(self._waiting):
            broken.append(f"{states[RequestState.WAITING]} requests say that they wait, {len(self._waiting)} do")
        return broken
