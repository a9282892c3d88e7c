"""Least recently released first. A request releases its tail first, so a child goes before its parent by itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex


class LRU:
    """One queue. Every call is O(1) a block."""

    def __init__(self, index: PrefixIndex) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._order)

    def put(self, blocks: Sequence[BlockId], depth: int) -> None:
        order = self._order
        for block in blocks:
            order[block] = None

    def remove(self, blocks: Sequence[BlockId]) -> None:
        order = self._order
        for block in blocks:
            del order[block]

    def discard(self, block: BlockId) -> None:
        del self._order[block]

    def take(self, count: int) -> list[BlockId]:
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(count)]

    def pop_all(self) -> list[BlockId]:
        blocks = list(self._order)
        self._order.clear()
        return blocks
