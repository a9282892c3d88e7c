"""The blocks that nobody owns, in the order in which they are reused. Knows ids and order only.

Two classes: *blank* blocks hold nothing findable and go first; *cached* blocks keep their hash and go least recently
released first. A request releases its tail first, so a child goes before its parent. Every operation is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from anaphora.core.ids import BlockId


class FreeQueue:
    """Block ids [1, num_blocks], all blank and free at first; id 0 is the null block and never here."""

    def __init__(self, num_blocks: int) -> None:
        self._blank: list[BlockId] = list(range(num_blocks, 0, -1))  # type: ignore[arg-type]  # a stack: 1 is on top
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blank) + len(self._cached)

    def __iter__(self) -> Iterator[BlockId]:
        """In order of reuse."""
        yield from reversed(self._blank)
        yield from self._cached

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def put_blank(self, block: BlockId) -> None:
        self._blank.append(block)

    def put_cached(self, block: BlockId) -> None:
        """Most recently released: last to be reused."""
        self._cached[block] = None

    def take(self, count: int) -> tuple[list[BlockId], list[BlockId]]:
        """The next `count` blocks to reuse: (blank ones, cached ones to evict). There must be as many."""
        blank = self._blank[: -count - 1 : -1]
        if blank:
            del self._blank[-len(blank) :]
        pop = self._cached.popitem
        return blank, [pop(last=False)[0] for _ in range(count - len(blank))]

    def remove(self, block: BlockId) -> None:
        """Take a cached block from the middle: it has an owner again."""
        del self._cached[block]

    def pop_all_cached(self) -> list[BlockId]:
        """Every cached block, in order of reuse; they are no longer in the queue."""
        blocks = list(self._cached)
        self._cached.clear()
        return blocks
