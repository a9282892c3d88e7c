"""Requests in, plans out, outcomes back: the face of the control plane.

There are no phases: each request has tokens, and computed tokens that catch up. `schedule()` gives a plan, `update()`
or `fail()` takes its outcome; at most one plan is in flight. Who is alive and where each one stands is known by
`request_queues`, what a step computes by `planner`, what comes of it here. No clock, no thread, no randomness: the same
calls give the same plans.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anaphora.config import SCHEDULING_POLICIES
from anaphora.core import accounting, limits
from anaphora.core.cache_manager import CacheManager
from anaphora.core.hashing import ExtraKey
from anaphora.core.ids import RequestId
from anaphora.core.plan import SampledToken, StepPlan, StepResult
from anaphora.core.planner import Planner
from anaphora.core.request import Request
from anaphora.core.request_queues import RequestQueues
from anaphora.core.snapshot import snapshot
from anaphora.core.stats import Counters, Stats
from anaphora.core.step import InFlight
from anaphora.errors import ConfigError, DuplicateRequestError, UnknownRequestError


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What a step did to one request: a token, an end, both, or neither (a chunk of its prompt)."""

    request: Request
    token: SampledToken | None = None
    finish_reason: str | None = None
    error: str | None = None


class Scheduler:
    """queues: of the requests that are alive. Raises ConfigError."""

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
        self._counters = Counters()
        self.queues = RequestQueues(cache, self._counters, by_priority=policy == "priority")
        self._planner = Planner(
            cache,
            self.queues,
            self._counters,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_request_tokens=long_prefill_token_threshold or max_num_batched_tokens,
        )
        self._in_flight: dict[RequestId, InFlight] | None = None
        self._ended_in_flight: dict[RequestId, str] = {}

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLongError or DuplicateRequestError; then nothing of it is kept."""
        if self.queues.get(request.request_id) is not None:
            raise DuplicateRequestError(f"request {request.request_id!r} is alive already; choose another id")
        self.check_fits(request.num_prompt_tokens)
        self.cache.register(request)
        self.queues.add(request)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Refuse at once what can never run, whatever is cached. Raises PromptTooLongError."""
        limits.check_fits(num_prompt_tokens, self.max_model_len, self.cache)

    def finish(self, request_id: str, reason: str) -> None:
        """End a live request from outside (`stop`, `abort`). While a step is in flight it ends with that step.

        Raises UnknownRequestError.
        """
        request = self.queues.get(request_id)
        if request is None:
            raise UnknownRequestError(f"no live request has the id {request_id!r}; it may have finished already")
        if self._in_flight is not None and request.request_id in self._in_flight:
            self._ended_in_flight[request.request_id] = reason
        else:
            self.queues.end(request, reason)

    @property
    def has_unfinished(self) -> bool:
        return len(self.queues) > 0

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> StepPlan | None:
        """Plan the next step; None if no request can run. The caller then owes `update` or `fail`.

        now_s: by any clock that does not go back; pins of cached blocks begin and end by it, and nothing else.
        """
        assert self._in_flight is None, "update() or fail() comes before the next schedule()"
        self.cache.pass_time(now_s)
        step = self._planner.plan()
        if not step.scheduled:
            return None
        self._in_flight = step.in_flight
        self._counters.num_steps += 1
        released = self.queues.take_released()
        return StepPlan(self._counters.num_steps, released, tuple(step.admitted), tuple(step.scheduled))

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
        self.queues.release_again(plan.released)
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
        self.queues.end(request, "error")
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
            self.queues.end(request, reason)
        return RequestUpdate(request, token, reason)

    # -- the cache as a whole ------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget everything cached. False, and no effect, while requests hold blocks or a step is in flight.

        preempt_running: give up the running requests' blocks first; they queue again and compute everything anew.
        """
        if self._in_flight is not None or (self.queues.running and not preempt_running):
            return False
        for request in reversed(self.queues.running[:]):
            self.queues.preempt(request)
        return self.cache.reset()

    def forget(self, key: ExtraKey) -> None:
        """No later request finds blocks of this salt or adapter. O(1); those that are alive go on as they are."""
        self.cache.finder.chains.scopes.forget(key)

    def forget_prefix(self, tokens: array[int], extra_keys: Sequence[ExtraKey]) -> int:
        """See Finder.forget_prefix. Requests that are alive go on as they are."""
        return self.cache.finder.forget_prefix(tokens, extra_keys, self.queues.oldest_epoch)

    def stats(self) -> Stats:
        """A snapshot; two of them give a delta."""
        return snapshot(self._counters, self.cache, self.queues)

    def inconsistencies(self) -> list[str]:
        """Equations between requests, queues and block tables that do not hold. For tests."""
        broken = self.queues.inconsistencies()
        if self._in_flight is None and self.cache.num_pending:
            broken.append(f"{self.cache.num_pending} blocks or checkpoints are pending between steps")
        if len(self.queues.running) > self.max_num_seqs:
            broken.append(f"{len(self.queues.running)} requests run, {self.max_num_seqs} may")
        return broken
