"""The blocks that nobody owns, in the order in which they are reused. Knows ids and order only.

Two classes: *blank* blocks hold nothing findable and go first; *cached* blocks keep their hash and go as the eviction
policy says, each child before its parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anaphora.core.eviction import EvictionPolicy
from anaphora.core.ids import BlockId


class FreeQueue:
    """Block ids [1, num_blocks], all blank and free at first; id 0 is the null block and never here.

    cached: the policy, which holds the cached blocks.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self._blank: list[BlockId] = list(range(num_blocks, 0, -1))  # type: ignore[arg-type]  # a stack: 1 is on top
        self.cached = policy

    def __len__(self) -> int:
        return len(self._blank) + len(self.cached)

    def __iter__(self) -> Iterator[BlockId]:
        """In order of reuse, as far as the policy has a fixed one."""
        yield from reversed(self._blank)
        yield from self.cached

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        return len(self.cached)

    def put_blank(self, blocks: Iterable[BlockId]) -> None:
        """The last one is the first to be reused."""
        self._blank.extend(blocks)

    def take(self, count: int) -> tuple[list[BlockId], list[BlockId]]:
        """The next `count` blocks to reuse: (blank ones, cached ones to evict). There must be as many."""
        blank = self._blank[: -count - 1 : -1]
        if blank:
            del self._blank[-len(blank) :]
        missing = count - len(blank)
        return blank, self.cached.take(missing) if missing else []
