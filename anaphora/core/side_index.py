"""Which block holds a side group's K/V of which beginning. A side group is every group but the spine.

Knows lineages and block ids; must not know ref counts, the free queue, tables or hashes of its own: *what* is cached is
the spine's knowledge (prefix_index), and a side block is found by the lineage that the spine has confirmed. So a hit is
exact here, too, whatever the hashes say, and the blocks of a window may go before or after their parents.

A block of a side group is labelled in the pool's own lists, where eviction policies read them, with its **key**: a
negative number for each (group, lineage), and no parent. So every policy sees it as a leaf.

Of one key there is at most one committed block, the latest.
"""

from __future__ import annotations

from typing import cast

from anaphora.core.ids import NO_LINEAGE, BlockHash, BlockId, Lineage
from anaphora.core.prefix_index import PrefixIndex


class SideIndex:
    """(group, lineage) -> block, for all side groups of one pool, numbered from 0. Every operation is O(1).

    num_live, num_cached: of each group, the blocks that have an owner, and the findable ones that have none. The pool
    keeps them.
    """

    def __init__(self, labels: PrefixIndex, num_groups: int) -> None:
        """labels: the index of the pool that the blocks are of."""
        self.num_groups = num_groups
        self.num_live = [0] * num_groups
        self.num_cached = [0] * num_groups
        self._hashes, self._lineages, self._parents = labels.hashes, labels.lineages, labels.parents
        self._committed: dict[Lineage, BlockId] = {}
        self._pending: dict[Lineage, BlockId] = {}

    def __len__(self) -> int:
        """How many blocks are committed."""
        return len(self._committed)

    def key(self, group: int, lineage: Lineage) -> Lineage:
        return Lineage(-(lineage * self.num_groups + group))

    def group_of(self, block: BlockId) -> int:
        """The group of a committed block."""
        return -self._lineages[block] % self.num_groups

    def find(self, group: int, lineage: Lineage) -> BlockId | None:
        """The committed block, else one that is pending. Changes nothing."""
        key = self.key(group, lineage)
        block = self._committed.get(key)
        return self._pending.get(key) if block is None else block

    def committed(self, group: int, lineage: Lineage) -> BlockId | None:
        return self._committed.get(self.key(group, lineage))

    def is_labelled(self, block: BlockId) -> bool:
        """Whether this block of the pool is a committed block of a side group."""
        return self._lineages[block] < 0

    def stage(self, group: int, lineages: list[Lineage], blocks: list[BlockId]) -> None:
        """Make blocks findable within the step in flight. Of two with the same key the first one is found."""
        for lineage, block in zip(lineages, blocks, strict=True):
            self._pending.setdefault(self.key(group, lineage), block)

    def end_pending(self, group: int, lineages: list[Lineage], blocks: list[BlockId]) -> None:
        """The step is over for these staged blocks, whatever came of it."""
        for lineage, block in zip(lineages, blocks, strict=True):
            key = self.key(group, lineage)
            if self._pending.get(key) == block:
                del self._pending[key]

    def put(self, group: int, lineage: Lineage, block_hash: BlockHash, block: BlockId) -> None:
        """Make a block findable by everyone. There is no other one with its key."""
        key = self.key(group, lineage)
        assert key not in self._committed, "the pool removes the one before"
        self._committed[key] = block
        self._lineages[block] = key
        self._parents[block] = NO_LINEAGE
        # Policies only remember and compare it; a pair is no block's hash, whatever the hash function.
        self._hashes[block] = cast(BlockHash, (group, block_hash))

    def remove(self, block: BlockId) -> None:
        """Make a committed block unfindable."""
        del self._committed[self._lineages[block]]
        self._lineages[block] = NO_LINEAGE
        self._hashes[block] = None

    def clear(self) -> list[BlockId]:
        """Make every block unfindable; returns them."""
        blocks = list(self._committed.values())
        for block in blocks:
            self.remove(block)
        return blocks

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def inconsistencies(self, alive: set[Lineage]) -> list[str]:
        """Equations that do not hold. alive: every lineage that a committed block of the spine has. For tests."""
        broken = []
        labelled = {BlockId(block) for block, lineage in enumerate(self._lineages) if lineage < 0}
        if labelled != set(self._committed.values()) or len(labelled) != len(self):
            broken.append(f"side blocks {sorted(labelled)} are labelled, not {sorted(self._committed.values())}")
        for key, block in self._committed.items():
            if self._lineages[block] != key or self._hashes[block] is None:
                broken.append(f"side block {block} does not have the label under which it is found")
            if -key // self.num_groups not in alive:
                broken.append(f"side block {block} outlives its lineage: it can never be found")
        return broken
