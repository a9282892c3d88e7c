"""S3-FIFO (Yang et al., SOSP 2023), for leaves: a small queue on probation, a main one, and the names of the evicted.

New content enters the small queue. What was used again, or comes back soon after its eviction, belongs to the main
queue, where each use buys one more round. O(1) a block, rounds amortised over the uses that paid for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from anaphora.core.eviction.leaves import LeafPolicy
from anaphora.core.ids import BlockHash, BlockId
from anaphora.core.prefix_index import PrefixIndex

_MAX_ROUNDS = 3
_SMALL_SHARE = 10  # the small queue is over its share with more than a tenth of the leaves


class S3FIFO(LeafPolicy):
    """As many names are remembered as the pool has blocks."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)
        self._max_ghosts = len(index.hashes)
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._small: OrderedDict[BlockId, None] = OrderedDict()
        self._main: OrderedDict[BlockId, None] = OrderedDict()
        self._is_main = [False] * len(index.hashes)
        self._rounds = [0] * len(index.hashes)

    def _before_put(self, blocks: Sequence[BlockId], depth: int) -> None:
        hashes = self._index.hashes
        for block in blocks:
            if self._is_new(block):
                block_hash: BlockHash = hashes[block]  # type: ignore[assignment]
                self._is_main[block] = block_hash in self._ghosts
                self._ghosts.pop(block_hash, None)
                self._rounds[block] = 0
            else:
                self._is_main[block] = True
                self._rounds[block] = min(self._rounds[block] + 1, _MAX_ROUNDS)

    def _remember(self, block: BlockId) -> None:
        self._ghosts[self._index.hashes[block]] = None  # type: ignore[index]
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def _queue_of(self, block: BlockId) -> OrderedDict[BlockId, None]:
        return self._main if self._is_main[block] else self._small

    def _add_leaf(self, block: BlockId) -> None:
        self._queue_of(block)[block] = None

    def _remove_leaf(self, block: BlockId) -> None:
        del self._queue_of(block)[block]

    def _evict_leaf(self) -> BlockId:
        small, main = self._small, self._main
        if small and (not main or len(small) * _SMALL_SHARE > len(small) + len(main)):
            block, _ = small.popitem(last=False)
            self._remember(block)
            return block
        while True:
            block, _ = main.popitem(last=False)
            if not self._rounds[block]:
                return block
            self._rounds[block] -= 1
            main[block] = None
