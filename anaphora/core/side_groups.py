"""All side groups of a layout as one: what the cache manager does for each of them alike.

Knows side groups, hits and the pool; must not know contents, budgets or the spine's tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from anaphora.core.block_pool import BlockPool
from anaphora.core.groups import AttentionKind
from anaphora.core.hit import Hit
from anaphora.core.ids import BlockHash, BlockId, Lineage, RequestId
from anaphora.core.side_group import SideGroup
from anaphora.core.stats import GroupGauges


class SideGroups:
    """The side groups of one pool, in the order of the layout. Empty where there is only the spine."""

    def __init__(self, kinds: Iterable[AttentionKind], pool: BlockPool, block_size: int) -> None:
        self._groups = [SideGroup(kind, number, pool, block_size) for number, kind in enumerate(kinds)]
        self._pool = pool

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SideGroup]:
        return iter(self._groups)

    def __getitem__(self, number: int) -> SideGroup:
        return self._groups[number]

    def _hit_of(self, hit: Hit) -> Iterator[tuple[SideGroup, Sequence[BlockId]]]:
        return zip(self._groups, hit.sides or [()] * len(self._groups), strict=True)

    # -- admission -----------------------------------------------------------------------------------------------------

    @property
    def num_owed(self) -> int:
        """Blocks that requests under way were promised and do not hold yet."""
        return sum(group.num_owed for group in self._groups)

    def num_needed(self, num_tokens: int, hit: Hit, chunk: int) -> int:
        """Free blocks that a request asks for: of the hit without an owner, and what else it will hold at once."""
        ref_counts = self._pool.ref_counts
        return sum(
            sum(ref_counts[block] == 0 for block in blocks) + max(0, group.most_blocks(num_tokens, chunk) - len(blocks))
            for group, blocks in self._hit_of(hit)
        )

    def admit(self, request_id: RequestId, num_tokens: int, hit: Hit, chunk: int) -> None:
        """Tables that begin with the hit, and a promise of what they will hold at once."""
        for group, blocks in self._hit_of(hit):
            self._pool.touch_side(group.number, blocks)
            group.admit(request_id, blocks, len(hit.blocks), group.most_blocks(num_tokens, chunk))

    # -- while a request runs ------------------------------------------------------------------------------------------

    def num_missing(self, request_id: RequestId, num_tokens: int) -> int:
        return sum(group.num_missing(request_id, num_tokens) for group in self._groups)

    def extend(self, request_id: RequestId, num_tokens: int) -> None:
        for group in self._groups:
            group.extend(request_id, num_tokens)

    def take_new(self, request_id: RequestId) -> tuple[tuple[BlockId, ...], ...]:
        return tuple(group.take_new(request_id) for group in self._groups)

    def stage(self, request_id: RequestId, first: int, lineages: list[Lineage]) -> tuple[list[BlockId], ...]:
        """Make the blocks pending that stand from `first` on in each table; they are of these beginnings."""
        staged = []
        for group in self._groups:
            blocks = group.tables[request_id].blocks[first : first + len(lineages)]
            self._pool.sides.stage(group.number, lineages, blocks)
            staged.append(blocks)
        return tuple(staged)

    def commit(self, lineages: list[Lineage], hashes: list[BlockHash], staged: Sequence[list[BlockId]]) -> None:
        for group, blocks in zip(self._groups, staged, strict=True):
            self._pool.commit_side(group.number, lineages, hashes, blocks)

    def withdraw(self, lineages: list[Lineage], staged: Sequence[list[BlockId]]) -> None:
        for group, blocks in zip(self._groups, staged, strict=True):
            self._pool.sides.end_pending(group.number, lineages, blocks)

    def give_back(self, request_id: RequestId, num_computed_tokens: int, *, caught_up: bool) -> None:
        for group in self._groups:
            group.give_back(request_id, num_computed_tokens, caught_up=caught_up)

    def free(self, request_id: RequestId) -> None:
        for group in self._groups:
            group.free(request_id)

    def gauges(self) -> list[GroupGauges]:
        sides = self._pool.sides
        return [
            GroupGauges(str(group.kind), sides.num_live[group.number], sides.num_cached[group.number])
            for group in self._groups
        ]
