"""LRU-2 (O'Neil et al., 1993): the block whose second-to-last use lies farthest back goes first. O(log n) a block.

Blocks used once go before all others, least recently used first, so one long prompt does not sweep the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.core.eviction.leaf_heap import LeafHeap
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex


class LRU2(LeafHeap):
    """key = (second-to-last use or 0, last use), counted in releases."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)
        self._last_use = [0] * len(index.hashes)
        self._clock = 0

    def _before_put(self, blocks: Sequence[BlockId], depth: int) -> None:
        self._clock += 1
        for block in blocks:
            before = 0 if self._is_new(block) else self._last_use[block]
            self._keys[block] = (before, self._clock)
            self._last_use[block] = self._clock
