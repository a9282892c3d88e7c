"""What the step in flight makes findable for one request, if it succeeds. Plain data."""

from __future__ import annotations

from typing import NamedTuple

from anaphora.core.ids import NO_LINEAGE, BlockId, Lineage, StateSlot


class Staged(NamedTuple):
    """blocks: of the spine. sides: for each side group, the blocks at the same places of its table.

    state_of, save_state: the lineage of the checkpoint that is saved, and its slot; None if none is.
    """

    blocks: list[BlockId]
    sides: tuple[list[BlockId], ...] = ()
    state_of: Lineage = NO_LINEAGE
    save_state: StateSlot | None = None
