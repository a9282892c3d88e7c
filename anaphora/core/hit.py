"""What a look-up found, and the longest hit that every group accepts.

The spine says how long the beginning is that it knows, and which lineages it goes through. Every side group and the
checkpoints of recurrent state may shorten that; what one of them takes away another may have needed, so it is asked
again until nobody takes anything away. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from anaphora.core.checkpoints import Checkpoints
from anaphora.core.ids import NO_LINEAGE, BlockId, Lineage, RequestId
from anaphora.core.side_group import SideGroup
from anaphora.core.side_index import SideIndex


class Hit(NamedTuple):
    """Leading blocks of the spine's table; those after the first num_committed are pending.

    sides: for each side group, the blocks that the hit needs: the last ones of num_tokens. pending_sides: those among
    them that the step in flight writes. num_unused: further blocks that the spine knows and some group cannot use.
    state_of: the lineage whose checkpoint is loaded. awaits: who saves a checkpoint in the step in flight with which
    the hit were longer.
    """

    blocks: list[BlockId]
    num_committed: int
    num_tokens: int
    sides: tuple[list[BlockId], ...] = ()
    pending_sides: tuple[BlockId, ...] = ()
    num_unused: int = 0
    state_of: Lineage = NO_LINEAGE
    awaits: RequestId | None = None

    @property
    def num_matched(self) -> int:
        """Blocks of the beginning that the spine knows, used or not."""
        return len(self.blocks) + self.num_unused


NO_HIT = Hit([], 0, 0)


def accepted_hit(
    blocks: list[BlockId],
    num_committed: int,
    lineages: Sequence[Lineage],
    block_size: int,
    groups: Iterable[SideGroup],
    index: SideIndex,
    checkpoints: Checkpoints | None,
) -> Hit:
    """blocks, num_committed: the spine's longest match. lineages: of these blocks."""
    count = _longest(groups, checkpoints, lineages, len(blocks))
    awaits = None
    if checkpoints is not None and checkpoints.num_pending and count < len(blocks):
        later = _longest(groups, checkpoints, lineages, len(blocks), with_pending=True)
        if later > count:
            awaits = checkpoints.writer(lineages[later - 1])
    sides = tuple(group.hit(lineages, count) for group in groups)
    pending: tuple[BlockId, ...] = ()
    if index.num_pending:
        pending = tuple(block for group_blocks in sides for block in group_blocks if not index.is_labelled(block))
    return Hit(
        blocks[:count],
        min(num_committed, count),
        count * block_size,
        sides,
        pending,
        len(blocks) - count,
        lineages[count - 1] if checkpoints is not None and count else NO_LINEAGE,
        awaits,
    )


def _longest(
    groups: Iterable[SideGroup],
    checkpoints: Checkpoints | None,
    lineages: Sequence[Lineage],
    count: int,
    *,
    with_pending: bool = False,
) -> int:
    before = -1
    while count != before:
        before = count
        if checkpoints is not None:
            count = checkpoints.longest(lineages, count, with_pending=with_pending)
        for group in groups:
            count = group.longest(lineages, count)
    return count
