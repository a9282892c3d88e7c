"""Leaves in the order of a key that is set when a block comes: the least one goes first. O(log n) a block."""

from __future__ import annotations

import heapq
from typing import Any

from anaphora.core.eviction.leaves import LeafPolicy
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex

_MIN_STALE = 64


class LeafHeap(LeafPolicy):
    """A subclass sets `_keys[block]` in `_before_put`; equal keys go by block id.

    A leaf that leaves stays in the heap until it surfaces, or until half of the heap is such entries.
    """

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)
        self._keys: list[Any] = [0] * len(index.hashes)
        self._heap: list[tuple[Any, BlockId]] = []
        self._leaves: set[BlockId] = set()

    def _add_leaf(self, block: BlockId) -> None:
        self._leaves.add(block)
        if len(self._heap) > 2 * len(self._leaves) + _MIN_STALE:
            self._heap = [(self._keys[leaf], leaf) for leaf in self._leaves]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (self._keys[block], block))

    def _remove_leaf(self, block: BlockId) -> None:
        self._leaves.discard(block)

    def _evict_leaf(self) -> BlockId:
        while True:
            key, block = heapq.heappop(self._heap)
            if block in self._leaves and key == self._keys[block]:
                self._leaves.discard(block)
                return block
