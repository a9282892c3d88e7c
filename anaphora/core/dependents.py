"""What hangs from the spine: blocks of the side groups and checkpoints of recurrent state, both of beginnings it knows.

They are found by the spine's lineages, so when it forgets a beginning, they go, too. A layout of full attention alone
has none of this. Knows lineages, side groups and checkpoints; must not know names, contents or the spine's tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.core.block_pool import BlockPool
from anaphora.core.capacity import Capacity
from anaphora.core.checkpoints import Checkpoints
from anaphora.core.hit import Hit, accepted_hit
from anaphora.core.ids import NO_LINEAGE, BlockId, Lineage, RequestId, StateSlot
from anaphora.core.prefix_index import PrefixIndex
from anaphora.core.request import Request
from anaphora.core.side_groups import SideGroups
from anaphora.core.staged import Staged


class Dependents:
    """pool: of the side groups. index: the spine's, which may be of another pool. checkpoints: None without a state."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        sides: SideGroups,
        checkpoints: Checkpoints | None,
        capacity: Capacity,
        block_size: int,
    ) -> None:
        self._pool = pool
        self._index = index
        self._sides = sides
        self._checkpoints = checkpoints
        self._capacity = capacity
        self._block_size = block_size

    def _lineages_of(self, blocks: Sequence[BlockId]) -> list[Lineage]:
        lineages = self._index.lineages
        return [lineages[block] for block in blocks]

    # -- admission -----------------------------------------------------------------------------------------------------

    def accepted(self, blocks: list[BlockId], num_committed: int) -> Hit:
        """blocks, num_committed: the spine's longest match."""
        lineages = self._lineages_of(blocks)
        return accepted_hit(
            blocks, num_committed, lineages, self._block_size, self._sides, self._pool.sides, self._checkpoints
        )

    def num_needed(self, request: Request, hit: Hit, max_chunk: int | None) -> int:
        """Free blocks that an admission takes besides the spine's. max_chunk: see CacheManager.admit."""
        return self._sides.num_needed(request.num_tokens, hit, self._chunk(request, max_chunk)) if self._sides else 0

    def admit(self, request: Request, hit: Hit, max_chunk: int | None) -> None:
        """Give a request its part of the hit, and a promise of what it will hold at once."""
        if self._sides:
            self._sides.admit(request.request_id, request.num_tokens, hit, self._chunk(request, max_chunk))

    def _chunk(self, request: Request, max_chunk: int | None) -> int:
        return self._capacity.chunk(request.num_tokens, max_chunk or request.num_tokens)

    def part(self, request: Request, num_blocks: int) -> None:
        """Prompts part from this one after so many blocks: a state must be saved there."""
        if self._checkpoints is not None:
            self._checkpoints.part(request, num_blocks * self._block_size)

    def load_state(self, hit: Hit) -> StateSlot | None:
        """The checkpoint that an admission with this hit begins from."""
        return None if self._checkpoints is None or not hit.state_of else self._checkpoints.use(hit.state_of)

    # -- while a request runs ------------------------------------------------------------------------------------------

    def chunk(self, request: Request, num_tokens: int) -> int:
        """See CacheManager.chunk."""
        if self._sides:
            num_tokens = self._capacity.chunk(request.num_tokens, num_tokens)
        if self._checkpoints is not None and request.chain is not None:
            start = request.num_computed_tokens
            num_tokens = self._checkpoints.next_stop(request, start, start + num_tokens) - start
        return num_tokens

    def stage(self, request: Request, blocks: list[BlockId], first: int, num_computed_tokens: int) -> Staged:
        """blocks: of the spine, staged in this step; they stand from `first` on in the table of the request."""
        lineages = self._lineages_of(blocks)
        sides = self._sides.stage(request.request_id, first, lineages)
        if self._checkpoints is None or (first + len(blocks)) * self._block_size != num_computed_tokens:
            return Staged(blocks, sides)
        slot = self._checkpoints.stage(request, num_computed_tokens, lineages[-1])
        return Staged(blocks, sides, NO_LINEAGE if slot is None else lineages[-1], slot)

    def commit(self, staged: Staged) -> None:
        """What was staged for the step in flight is written."""
        if staged.sides:
            hashes = [self._index.hashes[block] for block in staged.blocks]
            self._sides.commit(self._lineages_of(staged.blocks), hashes, staged.sides)  # type: ignore[arg-type]
        if self._checkpoints is not None and staged.save_state is not None:
            self._checkpoints.commit(staged.state_of)

    def withdraw(self, staged: Staged) -> None:
        """The step failed; the spine's blocks still have the lineages that they were staged with."""
        if staged.sides:
            self._sides.withdraw(self._lineages_of(staged.blocks), staged.sides)
        if self._checkpoints is not None and staged.save_state is not None:
            self._checkpoints.withdraw(staged.state_of)

    def give_back(self, request: Request) -> None:
        """Let go of what no later token of a running request sees."""
        caught_up = request.num_computed_tokens >= request.num_tokens
        self._sides.give_back(request.request_id, request.num_computed_tokens, caught_up=caught_up)

    def free(self, request_id: RequestId) -> None:
        """The request holds nothing any more."""
        self._sides.free(request_id)
        if self._checkpoints is not None:
            self._checkpoints.end(request_id)

    # -- the cache as a whole ------------------------------------------------------------------------------------------

    def lose(self, lineages: list[Lineage]) -> None:
        """No hit can need what is kept of beginnings that the spine has forgotten."""
        for lineage in lineages:
            self._pool.forget_sides(lineage)
            if self._checkpoints is not None:
                self._checkpoints.drop(lineage)

    def clear(self) -> None:
        """Drop every checkpoint: the pool has been reset, and its side groups with it."""
        if self._checkpoints is not None:
            self._checkpoints.clear()

    @property
    def num_pending(self) -> int:
        """What the step in flight is to make findable here."""
        num_states = 0 if self._checkpoints is None else self._checkpoints.num_pending
        return self._pool.sides.num_pending + num_states
