"""What the step in flight makes findable for one request, if it succeeds. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.core.ids import BlockId, Lineage, StateSlot
from anaphora.core.prefix_index import NO_LINEAGE


@dataclass(frozen=True, slots=True)
class Staged:
    """blocks: of the spine. sides: for each side group, the blocks at the same places of its table.

    state_of, save_state: the lineage of the checkpoint that is saved, and its slot; None if none is.
    """

    blocks: list[BlockId]
    sides: tuple[list[BlockId], ...] = ()
    state_of: Lineage = NO_LINEAGE
    save_state: StateSlot | None = None
