"""Where the blocks of a beginning were when a request let go of them: a hint, so that they are found all at once.

A lineage names one exact beginning and is never given out twice, so a block that has the lineage it had holds what it
held. Who knows *by content* that a chain begins as a trail does needs no names: one comparison at C speed for all
blocks. A trail that is out of date costs time, never a wrong hit. Knows ids; must not know what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from anaphora.core.common_length import common_length
from anaphora.core.ids import NO_LINEAGE, BlockId, Lineage


class Trail:
    """blocks: leading blocks of a table, two at least, and the lineage of each. Never changes what it says."""

    __slots__ = ("_gather", "_lineages", "blocks")  # the gatherer is made when it is first walked on: many never are

    def __init__(self, blocks: list[BlockId], lineages: Sequence[int]) -> None:
        self.blocks = blocks
        self._lineages = lineages
        self._gather: Callable[[Sequence[Lineage]], tuple[Lineage, ...]] | None = None

    def beginning(self, count: int) -> Trail:
        """The first `count` blocks of it, two at least."""
        return self if count >= len(self.blocks) else Trail(self.blocks[:count], self._lineages[:count])

    def num_unchanged(self, all_lineages: Sequence[Lineage]) -> int:
        """How many leading blocks hold what they held. all_lineages: by block id, now."""
        if self._gather is None:
            self._gather, self._lineages = itemgetter(*self.blocks), tuple(self._lineages)
        now = self._gather(all_lineages)
        return len(self.blocks) if now == self._lineages else common_length(now, self._lineages, 0)


def left_behind(
    before: Trail | None, table: list[BlockId], count: int, all_lineages: Sequence[Lineage], slack: int
) -> Trail | None:
    """The trail of a chain whose first `count` blocks are those of `table`, when its owner lets go of them.

    before: the one that it has; stays, as far as it is right, if fewer than `slack` blocks are missing from it.
    all_lineages: by block id, now. What is findable of a table is a beginning of it; nothing of it may be pending.
    """
    if before is not None and len(before.blocks) + slack > count:
        if table[: len(before.blocks)] == before.blocks:
            return before
        kept = common_length(before.blocks, table, 0)
        if kept > 1 and kept + slack > count:
            return before.beginning(kept)
    blocks = table[:count]
    first, last = all_lineages[blocks[0]], all_lineages[blocks[-1]]
    if NO_LINEAGE < first == last - count + 1 and count > 1:  # a child's is above its parent's: none is left out
        return Trail(blocks, range(first, last + 1))
    lineages = [all_lineages[block] for block in blocks]
    if lineages[-1] == NO_LINEAGE:
        del lineages[lineages.index(NO_LINEAGE) :]
    return Trail(blocks[: len(lineages)], lineages) if len(lineages) > 1 else None
