"""Pins over any eviction policy: blocks of a higher retention priority go later, until their time is over.

    cached free blocks    policy: those without a pin    levels 1, 2, ...: pinned ones, least recently released first
    take                  first -------------------->    then level by level, upwards

A pin says *later*, never *never*: an allocation that needs the room gets it. What is pinned of a prompt is always a
beginning of it, and along a prompt neither priority nor expiry rises; so a child goes before its parent:

    block       0   1   2   3   4   5   6        a pin of 2 until 50 s of blocks [0, 3), and
    priority    2   2   2   1   1   -   -        a pin of 1 until 90 s of blocks [0, 5):
    until, s   90  90  90  90  90   -   -        a block keeps the higher priority and the later end

Pins belong to contents (lineages), not to blocks: a copy takes over. They go when their time is over, when the content
is evicted, and with a reset. Knows the time only as it is told; must not know requests or tenants but by name.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from anaphora.core.eviction.base import EvictionPolicy
from anaphora.core.ids import NO_LINEAGE, BlockId, Lineage
from anaphora.core.prefix_index import PrefixIndex
from anaphora.errors import ConfigError
from anaphora.sampling_params import MAX_CACHE_PRIORITY

_MIN_OUT_OF_DATE = 64


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Most pinned blocks, as shares of the pool in [0, 1]: of all, and of one named tenant. Raises ConfigError."""

    max_pinned_share: float = 0.5
    max_pinned_share_per_tenant: float = 0.25

    def __post_init__(self) -> None:
        for name in ("max_pinned_share", "max_pinned_share_per_tenant"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a number in [0, 1], got {value!r}")


@dataclass(slots=True)
class _Pin:
    """tenant: who pinned this content first; it counts towards its limit.

    block, level: the free block that holds the content, and where it stands; None while it has an owner.
    """

    priority: int
    until_s: float
    depth: int
    tenant: str | None
    block: BlockId | None = None
    level: OrderedDict[BlockId, _Pin] | None = None


class Pinned:
    """An EvictionPolicy around another one. Costs O(1) a call while nothing is pinned, else O(1) a block.

    num_blocks: usable blocks of the pool, of which the limits are shares.
    """

    def __init__(self, policy: EvictionPolicy, index: PrefixIndex, num_blocks: int, limits: PinLimits) -> None:
        self.policy = policy
        self._index = index
        self._lineages = index.lineages
        self._limit = int(limits.max_pinned_share * num_blocks)
        self._tenant_limit = int(limits.max_pinned_share_per_tenant * num_blocks)
        self._pins: dict[Lineage, _Pin] = {}
        self._by_tenant: Counter[str] = Counter()
        self._ends: list[tuple[float, int, Lineage]] = []  # a heap of (until, -depth, lineage); some are out of date
        self._levels: list[OrderedDict[BlockId, _Pin]] = [OrderedDict() for _ in range(MAX_CACHE_PRIORITY)]
        self._num_free = 0  # in the levels

    # -- pins ----------------------------------------------------------------------------------------------------------

    @property
    def num_pinned(self) -> int:
        """Contents that have a pin, in use or not."""
        return len(self._pins)

    def pin(self, blocks: Sequence[BlockId], priority: int, until_s: float, tenant: str | None = None) -> int:
        """Pin leading blocks of a table that have an owner; returns how many of them are pinned now.

        Stops at the first one that is not findable, or that would exceed a limit: the pinned ones are a beginning.
        priority: 1 to MAX_CACHE_PRIORITY. until_s: by the clock of `expire`. tenant: None has no limit of its own.
        """
        assert 1 <= priority <= MAX_CACHE_PRIORITY, "a pin has a priority from 1 on"
        for depth, block in enumerate(blocks):
            lineage = self._lineages[block]
            if lineage == NO_LINEAGE:
                return depth
            pin = self._pins.get(lineage)
            if pin is None:
                if len(self._pins) >= self._limit:
                    return depth
                if tenant is not None:
                    if self._by_tenant[tenant] >= self._tenant_limit:
                        return depth
                    self._by_tenant[tenant] += 1
                self._pins[lineage] = _Pin(priority, until_s, depth, tenant)
            else:
                pin.priority = max(pin.priority, priority)
                if until_s <= pin.until_s:
                    continue
                pin.until_s = until_s
            heapq.heappush(self._ends, (until_s, -depth, lineage))
        if len(self._ends) > 2 * len(self._pins) + _MIN_OUT_OF_DATE:
            self._ends = [(pin.until_s, -pin.depth, lineage) for lineage, pin in self._pins.items()]
            heapq.heapify(self._ends)
        return len(blocks)

    def expire(self, now_s: float) -> None:
        """End the pins whose time is over. Their free blocks join the policy's, as if they were released now."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, _, lineage = heapq.heappop(self._ends)  # children first
            pin = self._pins.get(lineage)
            if pin is None or pin.until_s != until_s:
                continue
            block = pin.block
            if block is not None:
                self._leave(pin)
                self.policy.put([block], pin.depth)
            self._unpin(lineage)

    def _unpin(self, lineage: Lineage) -> None:
        tenant = self._pins.pop(lineage).tenant
        if tenant is not None:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def _in_level(self, block: BlockId) -> _Pin | None:
        """The pin of a free block that stands in a level."""
        pin = self._pins.get(self._lineages[block])
        return pin if pin is not None and pin.block == block else None

    def _leave(self, pin: _Pin) -> None:
        assert pin.block is not None and pin.level is not None, "only a free block stands in a level"
        del pin.level[pin.block]
        pin.block = pin.level = None
        self._num_free -= 1

    # -- the policy ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.policy) + self._num_free

    def __iter__(self) -> Iterator[BlockId]:
        return chain(self.policy, *self._levels)

    def put(self, blocks: Sequence[BlockId], depth: int) -> None:
        if not self._pins:
            self.policy.put(blocks, depth)
            return
        pins = [self._pins.get(self._lineages[block]) for block in blocks]
        num_loose = next((place for place, pin in enumerate(pins) if pin is not None), len(blocks))
        if num_loose:
            self.policy.put(blocks[:num_loose], depth)
        for block, pin in zip(blocks[num_loose:], pins[num_loose:], strict=True):
            assert pin is not None, "the pinned blocks of a table are a beginning of it"
            pin.block, pin.level = block, self._levels[pin.priority - 1]
            pin.level[block] = pin
            self._num_free += 1

    def remove(self, blocks: Sequence[BlockId]) -> None:
        if self._num_free:
            loose = []
            for block in blocks:
                pin = self._in_level(block)
                if pin is None:
                    loose.append(block)
                else:
                    self._leave(pin)
            blocks = loose
        if blocks:
            self.policy.remove(blocks)

    def discard(self, block: BlockId) -> None:
        pin = self._in_level(block)
        if pin is None:
            self.policy.discard(block)
        else:
            self._leave(pin)  # it stays pinned: the content lives on in another block

    def take(self, count: int) -> list[BlockId]:
        if not self._num_free:
            return self.policy.take(count)
        num_loose = min(count, len(self.policy))
        taken = self.policy.take(num_loose) if num_loose else []
        for level in self._levels if num_loose < count else ():
            while level and len(taken) < count:
                block, pin = level.popitem(last=False)
                pin.block = pin.level = None
                self._num_free -= 1
                taken.append(block)
                if self._index.hashes[block] not in self._index.copies:
                    self._unpin(self._lineages[block])
        return taken

    def pop_all(self) -> list[BlockId]:
        blocks = [*self.policy.pop_all(), *chain(*self._levels)]
        for level in self._levels:
            level.clear()
        self._pins.clear()
        self._by_tenant.clear()
        self._ends.clear()
        self._num_free = 0
        return blocks

    def inconsistencies(self) -> list[str]:
        """Rules of pins that do not hold. For tests; costs time in proportion to the pool."""
        broken = []
        in_levels = {block: pin for level in self._levels for block, pin in level.items()}
        if len(in_levels) != self._num_free or any(pin.block != block for block, pin in in_levels.items()):
            broken.append("the levels and the pins name different free blocks")
        if len(self._pins) > self._limit:
            broken.append(f"{len(self._pins)} contents are pinned, at most {self._limit} may be")
        tenants = Counter(pin.tenant for pin in self._pins.values() if pin.tenant is not None)
        if tenants != self._by_tenant or any(count > self._tenant_limit for count in tenants.values()):
            broken.append(f"pins by tenant are {tenants}, counted as {self._by_tenant}, limit {self._tenant_limit}")
        held = {lineage: BlockId(block) for block, lineage in enumerate(self._lineages) if lineage != NO_LINEAGE}
        for lineage, pin in self._pins.items():
            if lineage not in held:
                broken.append(f"a pin outlives its content, lineage {lineage}")
                continue
            parent = self._pins.get(self._index.parents[held[lineage]])
            if pin.depth and (parent is None or parent.priority < pin.priority or parent.until_s < pin.until_s):
                broken.append(f"block {held[lineage]} is pinned better than its parent")
        return broken
