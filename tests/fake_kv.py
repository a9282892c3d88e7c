"""A fake K/V pool and executor that follow plans only: the wrong-hit oracle of the control plane's tests.

What a slot holds is its group and the exact beginning that its K/V were computed for (salt and every token up to its
position), as a number. A token reads what it sees in every group, and the recurrent state before it: whoever reads
garbage writes garbage. A checkpoint holds the exact beginning whose state it is.
Knows plans, results, the layout and a salt per request; must not know the scheduler, its cache or its hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from anaphora.core.groups import CacheLayout
from anaphora.core.ids import NULL_BLOCK, BlockId, RequestId, StateSlot, TokenId
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
    """One request as an executor knows it. tables: one for each group. state: the beginning that it is after."""

    salt: Salt
    tokens: list[int]
    max_tokens: int
    tables: list[list[BlockId]]
    num_computed: int = 0
    state: int = GARBAGE


class FakeExecutor:
    """Checks each plan against the contract of `anaphora.core.plan`, and each read against the exact beginning.

    salts: request id -> salt, read when a request is admitted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        choose: Choose,
        salts: Mapping[str, Salt],
        layout: CacheLayout | None = None,
        num_state_slots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.layout = CacheLayout() if layout is None else layout
        self.checkpoints: dict[StateSlot, int] = {}
        self._num_state_slots = num_state_slots
        self.beginnings = Beginnings()
        self.requests: dict[RequestId, Known] = {}
        self._usable = range(1, num_blocks + 1)
        self._choose = choose
        self._salts = salts
        self._slots: dict[tuple[BlockId, int], tuple[int, int]] = {}  # (block, offset) -> (group, beginning)
        self._last_step = 0

    def execute(self, plan: StepPlan, failing: Collection[str] = ()) -> tuple[StepResult, set[RequestId]]:
        """The result, and every request whose K/V of this step are garbage: those failing and whoever read theirs."""
        self._take_over(plan)
        for scheduled in plan.scheduled:  # in plan order: a writer comes before its readers
            self._check_state(scheduled)
            self._check_reads(scheduled)
            self._write(scheduled)
        for scheduled in plan.scheduled:  # nobody wrote over what another one of this step needs
            self._check_reads(scheduled)
            self._check_writes(scheduled)

        worthless: set[RequestId] = set()
        for scheduled in plan.scheduled:
            if scheduled.request_id in failing:
                self._wipe(scheduled)
                worthless.add(scheduled.request_id)
            elif failing:
                self._write(scheduled)
                if self._has_garbage(scheduled):
                    worthless.add(scheduled.request_id)
        self._save_states(plan)

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
        self._save_states(plan)

    def _take_over(self, plan: StepPlan) -> None:
        assert plan.step == self._last_step + 1
        self._last_step = plan.step
        assert len(set(plan.released)) == len(plan.released)
        for request_id in plan.released:
            self.requests.pop(request_id, None)
        for admission in plan.admitted:
            assert admission.request_id not in self.requests, "admitted twice"
            self.requests[admission.request_id] = Known(
                self._salts[admission.request_id],
                list(admission.token_ids),
                admission.sampling.max_tokens,
                [[] for _ in self.layout.groups],
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
            assert len(scheduled.new_block_ids) == len(self.layout.groups)
            for kind, table, new in zip(self.layout.groups, known.tables, scheduled.new_block_ids, strict=True):
                table += new
                first = kind.first_visible(scheduled.start) // self.block_size  # those before may be anybody's
                table[:first] = [NULL_BLOCK] * len(table[:first])
                held = [block for block in table if block != NULL_BLOCK]
                assert all(block in self._usable for block in held)
                assert len(set(held)) == len(held)
                assert stop <= len(table) * self.block_size, "the table does not cover a scheduled position"
        self._load_states(plan, admitted)

    # -- recurrent state -----------------------------------------------------------------------------------------------

    def _load_states(self, plan: StepPlan, admitted: Collection[RequestId]) -> None:
        for scheduled in plan.scheduled:
            known = self.requests[scheduled.request_id]
            needs_state = self.layout.has_state and scheduled.request_id in admitted and scheduled.start > 0
            assert (scheduled.load_state is not None) == needs_state
            if scheduled.load_state is not None:
                known.state = self.checkpoints[scheduled.load_state]
            elif scheduled.request_id in admitted:
                known.state = self.beginnings.root(known.salt)

    def _check_state(self, scheduled: ScheduledRequest) -> None:
        if self.layout.has_state:
            known = self.requests[scheduled.request_id]
            own = [
                self.beginnings.root(known.salt),
                *self.beginnings.all_of(known.salt, known.tokens[: scheduled.start]),
            ]
            assert known.state == own[-1], f"wrong state: {scheduled.request_id!r} begins from another one's"

    def _save_states(self, plan: StepPlan) -> None:
        saved = [scheduled.save_state for scheduled in plan.scheduled if scheduled.save_state is not None]
        assert len(set(saved)) == len(saved), "two states are saved to one slot"
        for scheduled in plan.scheduled:
            if scheduled.save_state is not None:
                assert self.layout.has_state and 0 <= scheduled.save_state < self._num_state_slots
                assert (scheduled.start + len(scheduled.token_ids)) % self.block_size == 0
                self.checkpoints[scheduled.save_state] = self.requests[scheduled.request_id].state

    # -- K/V -----------------------------------------------------------------------------------------------------------

    def _slot(self, known: Known, group: int, position: int) -> tuple[BlockId, int]:
        block = known.tables[group][position // self.block_size]
        assert block != NULL_BLOCK, f"the token at position {position} is in the null block"
        return block, position % self.block_size

    def _earlier(self, known: Known, start: int) -> Iterator[tuple[int, int, tuple[BlockId, int]]]:
        """(group, position, slot) of what tokens from `start` on read of those before; the first of them sees most."""
        for group, kind in enumerate(self.layout.groups):
            for position in range(kind.first_visible(start), start):
                yield group, position, self._slot(known, group, position)

    def _check_reads(self, scheduled: ScheduledRequest) -> None:
        """What a request reads, in every group, is of its own beginning."""
        known = self.requests[scheduled.request_id]
        own = self.beginnings.all_of(known.salt, known.tokens[: scheduled.start])
        for group, position, slot in self._earlier(known, scheduled.start):
            assert self._slots.get(slot) == (group, own[position]), (
                f"wrong hit: {scheduled.request_id!r} reads slot {slot} of group {group} at position {position}"
            )

    def _check_writes(self, scheduled: ScheduledRequest) -> None:
        known = self.requests[scheduled.request_id]
        stop = scheduled.start + len(scheduled.token_ids)
        own = self.beginnings.all_of(known.salt, known.tokens[:stop])
        for position in range(scheduled.start, stop):
            for group in range(len(self.layout.groups)):
                assert self._slots[self._slot(known, group, position)] == (group, own[position]), "overwritten"

    def _write(self, scheduled: ScheduledRequest) -> None:
        known = self.requests[scheduled.request_id]
        stop = scheduled.start + len(scheduled.token_ids)
        own = self.beginnings.all_of(known.salt, known.tokens[:stop])
        kinds = self.layout.groups
        garbage = [
            (group, position)
            for group, position, slot in self._earlier(known, scheduled.start)
            if self._slots[slot][1] == GARBAGE
        ]
        for position in range(scheduled.start, stop):
            value = own[position]
            if any(earlier >= kinds[group].first_visible(position) for group, earlier in garbage):
                value = GARBAGE
            if self.layout.has_state and known.state == GARBAGE:
                value = GARBAGE
            for group in range(len(kinds)):
                self._slots[self._slot(known, group, position)] = group, value
                if value == GARBAGE:
                    garbage.append((group, position))
            known.state = value

    def _has_garbage(self, scheduled: ScheduledRequest) -> bool:
        known = self.requests[scheduled.request_id]
        positions = range(scheduled.start, scheduled.start + len(scheduled.token_ids))
        groups = range(len(self.layout.groups))
        return any(self._slots[self._slot(known, group, each)][1] == GARBAGE for each in positions for group in groups)

    def _wipe(self, scheduled: ScheduledRequest) -> None:
        known = self.requests[scheduled.request_id]
        for position in range(scheduled.start, scheduled.start + len(scheduled.token_ids)):
            for group in range(len(self.layout.groups)):
                self._slots[self._slot(known, group, position)] = group, GARBAGE
        known.state = GARBAGE
