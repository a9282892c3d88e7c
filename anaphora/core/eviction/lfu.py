"""Least frequently used, with ageing: LFU-DA (Arlitt et al., 2000). O(log n) a block.

key = age + uses, set when a block is released; the age is the key of the block evicted last. So a block that was
popular once is overtaken, in time, by those that are in use now.
"""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.core.eviction.leaf_heap import LeafHeap
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex


class AgeingLFU(LeafHeap):
    """Equal keys go by last use."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)
        self._uses = [0] * len(index.hashes)
        self._age = 0
        self._clock = 0

    def _before_put(self, blocks: Sequence[BlockId], depth: int) -> None:
        self._clock += 1
        for block in blocks:
            self._uses[block] = 1 if self._is_new(block) else self._uses[block] + 1
            self._keys[block] = (self._age + self._uses[block], self._clock)

    def _evict_leaf(self) -> BlockId:
        block = super()._evict_leaf()
        self._age = self._keys[block][0]
        return block
