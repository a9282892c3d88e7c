"""A fake K/V pool and executor that follow plans only: the wrong-hit oracle of the control plane's tests.

What a slot holds is the exact beginning that its K/V were computed for (salt and every token up to its position), as a
number. A write continues what the slot *before it in the block table* holds, as attention does: whoever reads garbage
writes garbage. Knows plans, results and a salt per request; must not know the scheduler, its cache or its hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from anaphora.core.ids import BlockId, RequestId, TokenId
from anaphora.core.plan import SampledToken, ScheduledRequest, StepPlan, StepResult

Salt = str | None
Choose = Callable[[Sequence[int]], int]
"""The model: every token so far -> the next one."""

GARBAGE = -1


class Beginnings:
    """One number for each exact beginning."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}

    def root(self, salt: Salt) -> int:
        return self._number((salt,), 0)

    def after(self, beginning: int, token: int) -> int:
        return GARBAGE if beginning == GARBAGE else self._number(beginning, token)

    def all_of(self, salt: Salt, tokens: Sequence[int]) -> list[int]:
        """The beginning that ends with each token."""
        beginning, found = self.root(salt), []
        for token in tokens:
            beginning = self.after(beginning, token)
            found.append(beginning)
        return found

    def _number(self, before: object, token: int) -> int:
        return self._numbers.setdefault((before, token), len(self._numbers))


@dataclass
class Known:
    """One request as an executor knows it."""

    salt: Salt
    tokens: list[int]
    max_tokens: int
    table: list[BlockId] = field(default_factory=list)
    num_computed: int = 0


class FakeExecutor:
    """Checks each plan against the contract of `anaphora.core.plan`, and each read against the exact beginning.

    salts: request id -> salt, read when a request is admitted.
    """

    def __init__(self, num_blocks: int, block_size: int, choose: Choose, salts: Mapping[str, Salt]) -> None:
        self.block_size = block_size
        self.beginnings = Beginnings()
        self.requests: dict[RequestId, Known] = {}
        self._usable = range(1, num_blocks + 1)
        self._choose = choose
        self._salts = salts
        self._slots: dict[tuple[BlockId, int], int] = {}
        self._last_step = 0

    def execute(self, plan: StepPlan, failing: Collection[str] = ()) -> tuple[StepResult, set[RequestId]]:
        """The result, and every request whose K/V of this step are garbage: those failing and whoever read theirs."""
        self._take_over(plan)
        for scheduled in plan.scheduled:  # in plan order: a writer comes before its readers
            self._check_reads(scheduled.request_id, scheduled.start)
            self._write(scheduled)
        for scheduled in plan.scheduled:  # nobody wrote over what another one of this step needs
            self._check_reads(scheduled.request_id, scheduled.start + len(scheduled.token_ids))

        worthless: set[RequestId] = set()
        for scheduled in plan.scheduled:
            if scheduled.request_id in failing:
                self._wipe(scheduled)
                worthless.add(scheduled.request_id)
            elif failing:
                self._write(scheduled)
                known = self.requests[scheduled.request_id]
                stop = scheduled.start + len(scheduled.token_ids)
                if GARBAGE in (self._slots[self._slot(known, position)] for position in range(stop)):
                    worthless.add(scheduled.request_id)

        sampled = {}
        for scheduled in plan.scheduled:
            known = self.requests[scheduled.request_id]
            known.num_computed += len(scheduled.token_ids)
            if scheduled.sample and scheduled.request_id not in failing:
                token = self._choose(known.tokens)
                known.tokens.append(token)
                sampled[scheduled.request_id] = SampledToken(TokenId(token))
        failed = {scheduled.request_id: "not finite" for scheduled in plan.scheduled if scheduled.request_id in failing}
        return StepResult(sampled, failed), worthless

    def break_down(self, plan: StepPlan) -> None:
        """The step raises after it has written: everything it wrote is worthless."""
        self._take_over(plan)
        for scheduled in plan.scheduled:
            self._write(scheduled)
        for scheduled in plan.scheduled:
            self._wipe(scheduled)

    def _take_over(self, plan: StepPlan) -> None:
        assert plan.step == self._last_step + 1
        self._last_step = plan.step
        assert len(set(plan.released)) == len(plan.released)
        for request_id in plan.released:
            del self.requests[request_id]
        for admission in plan.admitted:
            assert admission.request_id not in self.requests, "admitted twice"
            self.requests[admission.request_id] = Known(
                self._salts[admission.request_id], list(admission.token_ids), admission.sampling.max_tokens
            )
        admitted = {admission.request_id for admission in plan.admitted}
        assert len(admitted) == len(plan.admitted)
        # Everyone who holds blocks is owed a token.
        assert {scheduled.request_id for scheduled in plan.scheduled} == self.requests.keys()
        assert len(plan.scheduled) == len(self.requests), "scheduled twice"
        for scheduled in plan.scheduled:
            known = self.requests[scheduled.request_id]
            if scheduled.request_id in admitted:
                known.num_computed = scheduled.start
            assert scheduled.start == known.num_computed
            stop = scheduled.start + len(scheduled.token_ids)
            assert scheduled.start < stop <= len(known.tokens)
            assert list(scheduled.token_ids) == known.tokens[scheduled.start : stop]
            assert scheduled.sample == (stop == len(known.tokens) and known.max_tokens > 0)
            known.table += scheduled.new_block_ids
            assert all(block in self._usable for block in scheduled.new_block_ids)
            assert len(set(known.table)) == len(known.table)
            assert stop <= len(known.table) * self.block_size, "the table does not cover a scheduled position"

    def _slot(self, known: Known, position: int) -> tuple[BlockId, int]:
        return known.table[position // self.block_size], position % self.block_size

    def _check_reads(self, request_id: RequestId, stop: int) -> None:
        known = self.requests[request_id]
        for position, own in enumerate(self.beginnings.all_of(known.salt, known.tokens[:stop])):
            slot = self._slot(known, position)
            assert self._slots.get(slot) == own, f"wrong hit: {request_id!r} reads slot {slot} at position {position}"

    def _write(self, scheduled: ScheduledRequest) -> None:
        known = self.requests[scheduled.request_id]
        for position, token in enumerate(scheduled.token_ids, scheduled.start):
            before = self._slots[self._slot(known, position - 1)] if position else self.beginnings.root(known.salt)
            self._slots[self._slot(known, position)] = self.beginnings.after(before, token)

    def _wipe(self, scheduled: ScheduledRequest) -> None:
        known = self.requests[scheduled.request_id]
        for position in range(scheduled.start, scheduled.start + len(scheduled.token_ids)):
            self._slots[self._slot(known, position)] = GARBAGE
