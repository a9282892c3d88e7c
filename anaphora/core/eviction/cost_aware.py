"""What is dear to compute again stays longer: GreedyDual-Size-Frequency (Cherkasova, 1998) by depth. O(log n) a block.

key = age + uses * cost, set when a block is released; the age is the key of the block evicted last. A token attends to
everything before it, so a block costs the more the deeper it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.core.eviction.leaf_heap import LeafHeap
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex


class CostAware(LeafHeap):
    """cost = 1 + depth / double_at: at that depth, in blocks, a block costs twice what the first one does."""

    def __init__(self, index: PrefixIndex, double_at: int = 64) -> None:
        super().__init__(index)
        self._double_at = double_at
        self._uses = [0] * len(index.hashes)
        self._age = 0.0

    def _before_put(self, blocks: Sequence[BlockId], depth: int) -> None:
        for place, block in enumerate(blocks):
            self._uses[block] = 1 if self._is_new(block) else self._uses[block] + 1
            self._keys[block] = self._age + self._uses[block] * (1 + max(depth - place, 0) / self._double_at)

    def _evict_leaf(self) -> BlockId:
        block = super()._evict_leaf()
        self._age = self._keys[block]
        return block
