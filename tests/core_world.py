"""A scheduler and all around it that its tests need: fake K/V, plain-dict oracles, the equations after each call.

Standard library only, so that a mutant can be run against it in a bare process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fake_kv import Choose, FakeExecutor, Salt

from anaphora.core import (
    BlockChain,
    CacheLayout,
    CacheManager,
    Counters,
    Request,
    RequestUpdate,
    Scheduler,
    StepPlan,
    check_cache,
    check_scheduler,
    salt_key,
    sha256,
)
from anaphora.core.eviction.pinned import PinLimits
from anaphora.core.hashing import HashFunction
from anaphora.core.ids import BlockId, RequestId, StateSlot
from anaphora.core.what_if import WhatIf
from anaphora.sampling_params import SamplingParams

ROOT = b"what the model is"


def count_up(tokens: Sequence[int]) -> int:
    """A model for examples: its output is like no prompt."""
    return 10_000 + len(tokens)


def make_chain(
    tokens: Sequence[int], block_size: int, *, salt: Salt = None, hash_function: HashFunction = sha256
) -> BlockChain:
    """The chain of every full block of `tokens`."""
    request = make_request("chain", tokens, salt=salt)
    chain = BlockChain(ROOT, block_size, hash_function, request.extra_keys)
    chain.extend(request.tokens)
    return chain


def make_request(
    request_id: str,
    tokens: Sequence[int],
    max_tokens: int = 1,
    *,
    salt: Salt = None,
    priority: int = 0,
    eos: frozenset[int] = frozenset(),
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
    scoring: bool = False,
    cache_priority: int = 0,
    pin_ttl_s: float | None = None,
    tenant: str | None = None,
) -> Request:
    return Request(
        request_id,
        tokens,
        SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop,
            prompt_logprobs=0 if scoring else None,
            cache_priority=cache_priority,
            pin_ttl_s=pin_ttl_s,
        ),
        priority=priority,
        extra_keys=() if salt is None else (salt_key(salt),),
        eos_token_ids=eos,
        tenant=tenant,
    )


class Findable:
    """Which blocks and checkpoints everyone may find, by plans and outcomes alone.

    held: for each group, block id -> the beginning that ends it. states: slot -> the beginning whose state it is. An
    upper bound where there are side groups: the control plane forgets more, as it keeps one block of each beginning.
    """

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor
        self._block_size = executor.block_size
        self._kinds = executor.layout.groups
        self.held: list[dict[BlockId, int]] = [{} for _ in self._kinds]
        self.states: dict[StateSlot, int] = {}
        self._filled: dict[RequestId, list[dict[BlockId, int]]] = {}
        self._saved: dict[RequestId, tuple[StateSlot, int]] = {}

    def clear(self) -> None:
        for held in (*self.held, self.states):
            held.clear()

    def _ends(self, salt: Salt, tokens: Sequence[int]) -> list[int]:
        """The beginning that ends each full block."""
        return self._executor.beginnings.all_of(salt, tokens)[self._block_size - 1 :: self._block_size]

    def plan(self, plan: StepPlan) -> None:
        """After the executor has taken the plan over: new blocks lose what they held; full ones are about to hold."""
        admitted = {admission.request_id for admission in plan.admitted}
        self._filled, self._saved = {}, {}
        for scheduled in plan.scheduled:
            num_hits = scheduled.start // self._block_size if scheduled.request_id in admitted else 0
            for new in scheduled.new_block_ids:
                for block in new[num_hits:]:
                    for held in self.held:
                        held.pop(block, None)
            if scheduled.save_state is not None:
                self.states.pop(scheduled.save_state, None)
        for scheduled in plan.scheduled:
            known = self._executor.requests[scheduled.request_id]
            stop = (scheduled.start + len(scheduled.token_ids)) // self._block_size
            ends = self._ends(known.salt, known.tokens)
            first = scheduled.start // self._block_size
            self._filled[scheduled.request_id] = [
                dict(zip(table[first:stop], ends[first:stop], strict=True)) for table in known.tables
            ]
            if scheduled.save_state is not None:
                self._saved[scheduled.request_id] = scheduled.save_state, ends[stop - 1]

    def commit(self, failed: Collection[RequestId]) -> None:
        """The step has run."""
        for request_id, filled in self._filled.items():
            if request_id not in failed:
                for held, blocks in zip(self.held, filled, strict=True):
                    held.update(blocks)
        self.states.update(saved for request_id, saved in self._saved.items() if request_id not in failed)

    def longest(self, salt: Salt, tokens: Sequence[int]) -> int:
        """Leading full blocks of `tokens` that everyone may use, capped so that the last token is computed."""
        ends = self._ends(salt, tokens[:-1])
        return next(count for count in range(len(ends), -1, -1) if self._is_usable(ends, count))

    def _is_usable(self, ends: Sequence[int], count: int) -> bool:
        if self._executor.layout.has_state and count and ends[count - 1] not in self.states.values():
            return False
        return all(
            set(ends[kind.first_visible(count * self._block_size) // self._block_size : count]) <= set(held.values())
            for kind, held in zip(self._kinds, self.held, strict=True)
        )


class World:
    """`schedule` and then `update` or `fail`, or `step` for both; every call checks the equations.

    Block ids, counters and outcomes are compared with what plans and results alone say that they must be.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        budget: int = 64,
        max_num_seqs: int = 8,
        policy: str = "fcfs",
        max_model_len: int | None = None,
        caching: bool = True,
        hash_function: HashFunction = sha256,
        eviction_policy: str = "lru",
        threshold: int | None = None,
        choose: Choose = count_up,
        pin_limits: PinLimits | None = None,
        layout: CacheLayout | None = None,
        num_state_slots: int = 0,
        state_checkpoint_interval: int = 512,
    ) -> None:
        self.cache = CacheManager(
            num_blocks,
            block_size,
            layout=layout,
            num_state_slots=num_state_slots,
            state_checkpoint_interval=state_checkpoint_interval,
            root=ROOT,
            hash_function=hash_function,
            enable_prefix_caching=caching,
            eviction_policy=eviction_policy,
            pin_limits=pin_limits,
            what_if=WhatIf(num_blocks, block_size),
            min_trail_blocks=2,  # so that short prompts walk on trails, too
        )
        self.now_s = 0.0  # a second passes with each step
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            policy=policy,
            long_prefill_token_threshold=threshold,
        )
        self.salts: dict[str, Salt] = {}
        self.executor = FakeExecutor(num_blocks, block_size, choose, self.salts, layout, num_state_slots)
        self.findable = Findable(self.executor)
        self.requests: dict[str, Request] = {}  # every one that was ever taken
        self.in_flight: StepPlan | None = None
        self.expected = Counters()  # those that plans and results determine
        self._caching = self.cache.enable_prefix_caching
        self._furthest: dict[str, int] = {}  # leading positions that a request has had, found or computed

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int = 1,
        *,
        salt: Salt = None,
        priority: int = 0,
        eos: frozenset[int] = frozenset(),
        stop: tuple[int, ...] = (),
        min_tokens: int = 0,
        scoring: bool = False,
        cache_priority: int = 0,
        pin_ttl_s: float | None = None,
        tenant: str | None = None,
    ) -> Request:
        request = make_request(
            request_id,
            tokens,
            max_tokens,
            salt=salt,
            priority=priority,
            eos=eos,
            stop=stop,
            min_tokens=min_tokens,
            scoring=scoring,
            cache_priority=cache_priority,
            pin_ttl_s=pin_ttl_s,
            tenant=tenant,
        )
        self.scheduler.add(request)
        self.salts[request_id] = salt
        self.requests[request_id] = request
        self._furthest.pop(request_id, None)
        return request

    def finish(self, request_id: str, reason: str = "abort") -> None:
        self.scheduler.finish(request_id, reason)
        self._check()

    def reset(self, preempt_running: bool = False) -> bool:
        done = self.scheduler.reset_prefix_cache(preempt_running)
        if done:
            self.findable.clear()
        self._check()
        return done

    def look_up(self, tokens: Sequence[int], salt: Salt = None) -> int:
        """Blocks that a new request with these tokens would find now. Checks that looking changes nothing."""
        request = make_request("probe", tokens, salt=salt)
        self.cache.register(request)
        before = self.snapshot()
        hit = self.cache.look_up(request)
        assert self.snapshot() == before, "a look-up changed state"
        assert hit.num_tokens == len(hit.blocks) * self.cache.block_size < len(tokens)
        return len(hit.blocks)

    def snapshot(self) -> tuple[object, ...]:
        pools = (self.cache.pool, self.cache.spine)
        return (
            [(list(pool.free_queue), list(pool.ref_counts), list(pool.index.hashes)) for pool in pools],
            self.scheduler.stats(),
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        assert self.in_flight is None
        self.in_flight = plan = self.scheduler.schedule(self.now_s)
        self.now_s += 1
        if plan is None:
            return None
        assert sum(len(each.token_ids) for each in plan.scheduled) <= self.scheduler.max_num_batched_tokens
        assert len(plan.scheduled) <= self.scheduler.max_num_seqs
        self.expected.num_steps += 1
        check_cache(self.cache)
        return plan

    def update(self, failing: Collection[str] = ()) -> list[RequestUpdate]:
        """Run the plan in flight; `failing` give values that are not finite."""
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        result, worthless = self.executor.execute(plan, failing)
        self.findable.plan(plan)
        self._count_admissions(plan)
        updates = self.scheduler.update(plan, result)
        assert [update.request.request_id for update in updates] == [entry.request_id for entry in plan.scheduled]
        failed = {update.request.request_id for update in updates if update.error is not None}
        wrong = f"{sorted(failed)} end with an error, but garbage is what {sorted(worthless)} wrote"
        assert worthless <= failed, wrong
        # Without full attention somebody may hang on a beginning whose blocks it does not read.
        assert failed == worthless or not self.cache.layout.has_spine, wrong
        self._count_computed(plan, failed)
        self._commit(plan, failed)
        self._check()
        return updates

    def fail(self) -> list[RequestUpdate]:
        """The plan in flight raises after it has written."""
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        self.executor.break_down(plan)
        self.findable.plan(plan)
        self._count_admissions(plan)
        updates = self.scheduler.fail(plan, "the device is gone")
        assert [update.request.request_id for update in updates] == [entry.request_id for entry in plan.scheduled]
        assert all(update.finish_reason == "error" and update.token is None for update in updates)
        self.expected.num_failed_steps += 1
        self._commit(plan, {update.request.request_id for update in updates})
        self._check()
        return updates

    def step(self, failing: Collection[str] = ()) -> StepPlan:
        plan = self.schedule()
        assert plan is not None, "nothing to do"
        self.update(failing)
        return plan

    def run(self, max_steps: int = 1_000) -> list[StepPlan]:
        """Step until every request has ended."""
        plans: list[StepPlan] = []
        while self.scheduler.has_unfinished:
            assert len(plans) < max_steps, "somebody starves"
            plans.append(self.step())
        return plans

    # -- what must be true ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.in_flight is not None:  # its outcome is not counted yet
            return
        check_scheduler(self.scheduler)
        counters = self.scheduler.stats().counters
        for name in ("queried", "hit", "bypassed", "computed", "computed_prompt", "recomputed", "requeried", "rehit"):
            field = f"num_{name}_tokens"
            assert getattr(counters, field) == getattr(self.expected, field), field
        assert counters.num_steps == self.expected.num_steps
        assert counters.num_failed_steps == self.expected.num_failed_steps
        if counters.num_collisions == 0:
            assert counters.num_committed_blocks == self.expected.num_committed_blocks

    def _count_admissions(self, plan: StepPlan) -> None:
        starts = {scheduled.request_id: scheduled.start for scheduled in plan.scheduled}
        for admission in plan.admitted:
            hit, request_id = starts[admission.request_id], admission.request_id
            scoring = self.requests[request_id].sampling.prompt_logprobs is not None
            if scoring and self._furthest.get(request_id, 0) < admission.num_prompt_tokens:
                assert hit <= self._furthest.get(request_id, 0), "a position that is to be scored was not computed"
            if request_id in self._furthest:
                self.expected.num_requeried_tokens += len(admission.token_ids)
                self.expected.num_rehit_tokens += hit
            elif scoring:
                self.expected.num_bypassed_tokens += len(admission.token_ids)
            else:
                self.expected.num_queried_tokens += len(admission.token_ids)
                self.expected.num_hit_tokens += hit
                assert self.requests[request_id].num_cached_tokens == hit
            self._furthest[request_id] = max(hit, self._furthest.get(request_id, 0))

    def _count_computed(self, plan: StepPlan, failed: Collection[str]) -> None:
        for scheduled in plan.scheduled:
            if scheduled.request_id in failed:
                continue
            positions = range(scheduled.start, scheduled.start + len(scheduled.token_ids))
            furthest = self._furthest[scheduled.request_id]
            num_prompt_tokens = self.requests[scheduled.request_id].num_prompt_tokens
            self.expected.num_computed_tokens += len(positions)
            self.expected.num_recomputed_tokens += sum(position < furthest for position in positions)
            self.expected.num_computed_prompt_tokens += sum(
                furthest <= position < num_prompt_tokens for position in positions
            )
            self._furthest[scheduled.request_id] = max(furthest, positions.stop)

    def _commit(self, plan: StepPlan, failed: Collection[RequestId]) -> None:
        self.findable.commit(failed)
        if not self._caching:
            self.findable.clear()
            return
        size = self.cache.block_size
        self.expected.num_committed_blocks += sum(
            (entry.start + len(entry.token_ids)) // size - entry.start // size
            for entry in plan.scheduled
            if entry.request_id not in failed
        )
