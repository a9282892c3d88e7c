"""Checkpoints of recurrent state: which beginning's state is kept, in which slot, and where a step ends to save one.

A recurrent state cannot be cut: a hit of h tokens needs the state after exactly h of them. It is kept at block
boundaries, under the lineage of the block that ends there:

    every `interval` tokens                 a beginning that is shared for the first time loses less than that
    the last boundary before a prompt ends  the same prompt again, or a longer one, loses at most a block
    where two prompts were seen to part     what is shared again loses nothing
    each boundary while decoding            the next turn; only the latest one of a request stays (it *rolls*)

Knows lineages, slots and requests' lengths; must not know blocks or what a state is. Slots have a budget and an LRU
order of their own. A checkpoint is written once and copied on use: an executor loads before anything else in a step
and saves after all else, so a slot may change hands in the step that loads from it. No slot: no checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.core.ids import NO_LINEAGE, Lineage, RequestId, StateSlot, cdiv
from anaphora.core.request import Request
from anaphora.errors import ConfigError


@dataclass(slots=True)
class _Checkpoint:
    """rolling_for: the request that drops it when it saves the next one; None if it is to stay."""

    slot: StateSlot
    rolling_for: RequestId | None


class Checkpoints:
    """`num_slots` checkpoints at most. interval: tokens, rounded up to whole blocks. Raises ConfigError."""

    def __init__(self, num_slots: int, interval: int, block_size: int) -> None:
        if num_slots < 0:
            raise ConfigError(f"num_state_slots must be at least 0, got {num_slots}")
        if interval < 1:
            raise ConfigError(f"state_checkpoint_interval must be at least 1 token, got {interval}")
        self.num_slots = num_slots
        self._block_size = block_size
        self._interval = cdiv(interval, block_size) * block_size
        self._free = [StateSlot(slot) for slot in range(num_slots - 1, -1, -1)]  # a stack: 0 is on top
        self._held: OrderedDict[Lineage, _Checkpoint] = OrderedDict()  # least recently used first
        self._pending: dict[Lineage, tuple[StateSlot, RequestId, bool]] = {}  # slot, writer, whether it rolls
        self._rolling: dict[RequestId, Lineage] = {}
        self._partings: dict[RequestId, set[int]] = {}

    def __len__(self) -> int:
        """How many are held: saved by a step that succeeded."""
        return len(self._held)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    # -- look-up -------------------------------------------------------------------------------------------------------

    def longest(self, lineages: Sequence[Lineage], num_blocks: int, *, with_pending: bool = False) -> int:
        """The most leading blocks, at most num_blocks, after which the state is known; 0 always is.

        with_pending: whether this step's own checkpoints count. Nobody can load those before it is over.
        """
        for count in range(num_blocks, 0, -1):
            lineage = lineages[count - 1]
            if lineage in self._held or (with_pending and lineage in self._pending):
                return count
        return 0

    def writer(self, lineage: Lineage) -> RequestId | None:
        """Who saves this state in the step in flight."""
        pending = self._pending.get(lineage)
        return None if pending is None else pending[1]

    def use(self, lineage: Lineage) -> StateSlot:
        """The slot to load from. What was used once is to stay, whoever saved it."""
        checkpoint = self._held[lineage]
        checkpoint.rolling_for = None
        self._held.move_to_end(lineage)
        return checkpoint.slot

    # -- where a step ends ---------------------------------------------------------------------------------------------

    def part(self, request: Request, num_tokens: int) -> None:
        """Others were seen to share this many tokens with a request: a block boundary that it has yet to reach."""
        self._partings.setdefault(request.request_id, set()).add(num_tokens)

    def next_stop(self, request: Request, start: int, stop: int) -> int:
        """Where a step that computes [start, stop) ends, at the latest, to save a state on the way."""
        boundaries = {(start // self._interval + 1) * self._interval, self._last_boundary(request)}
        boundaries |= self._partings.get(request.request_id, set())
        return min((boundary for boundary in boundaries if start < boundary < stop), default=stop)

    def _last_boundary(self, request: Request) -> int:
        """The last one at which the same prompt could hit."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def _stays(self, request: Request, num_tokens: int) -> bool:
        return (
            num_tokens % self._interval == 0
            or num_tokens == self._last_boundary(request)
            or num_tokens in self._partings.get(request.request_id, ())
        )

    # -- save ----------------------------------------------------------------------------------------------------------

    def stage(self, request: Request, num_tokens: int, lineage: Lineage) -> StateSlot | None:
        """The slot to save to after the step in flight, which ends at the block boundary num_tokens; None for none."""
        stays = self._stays(request, num_tokens)
        if not stays and num_tokens < request.num_prompt_tokens:
            return None
        if lineage in self._held:
            if stays:
                self._held[lineage].rolling_for = None
            return None
        if lineage in self._pending:
            slot, writer, rolls = self._pending[lineage]
            self._pending[lineage] = slot, writer, rolls and not stays
            return None
        own = None if stays else self._rolls(request.request_id)
        if self._free:
            slot = self._free.pop()
        elif own is not None:  # a long output takes one slot, not those of the prompts
            slot = self._held.pop(own).slot
        elif self._held:
            slot = self._held.popitem(last=False)[1].slot
        else:
            return None
        self._pending[lineage] = slot, request.request_id, not stays
        return slot

    def commit(self, lineage: Lineage) -> None:
        """The step has succeeded: the staged checkpoint is there for all."""
        slot, request_id, rolls = self._pending.pop(lineage)
        self._held[lineage] = _Checkpoint(slot, request_id if rolls else None)
        if rolls:
            before = self._rolls(request_id)
            self._rolling[request_id] = lineage
            if before is not None:
                self.drop(before)

    def _rolls(self, request_id: RequestId) -> Lineage | None:
        """The checkpoint that this request drops when it saves the next one."""
        lineage = self._rolling.get(request_id, NO_LINEAGE)
        checkpoint = self._held.get(lineage)
        return None if checkpoint is None or checkpoint.rolling_for != request_id else lineage

    def withdraw(self, lineage: Lineage) -> None:
        """The step has failed."""
        self._free.append(self._pending.pop(lineage)[0])

    def drop(self, lineage: Lineage) -> None:
        """Forget the checkpoint of this beginning, if there is one."""
        checkpoint = self._held.pop(lineage, None)
        if checkpoint is not None:
            self._free.append(checkpoint.slot)

    def end(self, request_id: RequestId) -> None:
        """A request runs no longer. What it saved last stays: the end of a turn."""
        lineage = self._rolls(request_id)
        if lineage is not None:
            self._held[lineage].rolling_for = None
        self._rolling.pop(request_id, None)
        self._partings.pop(request_id, None)

    def clear(self) -> None:
        for lineage in list(self._held):
            self.drop(lineage)

    def inconsistencies(self, alive: set[Lineage]) -> list[str]:
        """Equations that do not hold. alive: every lineage that a committed block of the spine has. For tests."""
        broken = []
        slots = [
            *self._free,
            *(each.slot for each in self._held.values()),
            *(slot for slot, *_ in self._pending.values()),
        ]
        if sorted(slots) != list(range(self.num_slots)):
            broken.append(f"state slots free, held and pending are {sorted(slots)}, not 0 to {self.num_slots - 1}")
        if orphans := self._held.keys() - alive:
            broken.append(f"checkpoints of lineages {sorted(orphans)} outlive them")
        rolling = [each.rolling_for for each in self._held.values() if each.rolling_for is not None]
        if len(set(rolling)) != len(rolling):
            broken.append(f"requests {sorted(rolling)} hold more than one rolling checkpoint")
        return broken
