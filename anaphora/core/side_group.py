"""The block tables of one side group: what a hit needs, what a running request holds, and what it gives back.

    entries of a table   0 ....... first ............. len
                         [ null  )[ held by the request )

Knows one attention kind, block tables and the pool; must not know contents, hashes, budgets or the other groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.core.block_pool import BlockPool
from anaphora.core.groups import AttentionKind
from anaphora.core.ids import NULL_BLOCK, BlockId, Lineage, RequestId, cdiv


@dataclass(slots=True)
class SideTable:
    """first: entries before it are the null block. num_planned: leading entries that the executor knows."""

    blocks: list[BlockId]
    first: int
    num_planned: int = 0

    @property
    def num_held(self) -> int:
        return len(self.blocks) - self.first


class SideGroup:
    """number: of this group among the side groups of the pool.

    tables: of the live requests. promises: of those behind their known tokens, the most blocks that they will hold at
    once; an admission counts on them.
    """

    def __init__(self, kind: AttentionKind, number: int, pool: BlockPool, block_size: int) -> None:
        self.kind = kind
        self.number = number
        self.tables: dict[RequestId, SideTable] = {}
        self.promises: dict[RequestId, int] = {}
        self._pool = pool
        self._block_size = block_size

    # -- what a length needs -------------------------------------------------------------------------------------------

    def first_block(self, num_tokens: int) -> int:
        """The first block that the token at position num_tokens sees."""
        return self.kind.first_visible(num_tokens) // self._block_size

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a request of num_tokens holds at once, computing at most `chunk` of them in a step."""
        num_blocks = cdiv(num_tokens, self._block_size)
        if self.kind.span is None:
            return num_blocks
        # What a chunk writes and its first token sees: span - 1 + chunk positions in a row, wherever they begin.
        return min(num_blocks, cdiv(self.kind.span + chunk - 2, self._block_size) + 1)

    @property
    def most_blocks_between_steps(self) -> int | None:
        """The most blocks that one request holds when no step is in flight."""
        return None if self.kind.span is None else cdiv(self.kind.span, self._block_size) + 2

    @property
    def num_owed(self) -> int:
        """Blocks that requests under way were promised and do not hold yet."""
        return sum(max(0, promise - self.tables[name].num_held) for name, promise in self.promises.items())

    # -- look-up -------------------------------------------------------------------------------------------------------

    def longest(self, lineages: Sequence[Lineage], num_blocks: int) -> int:
        """The longest hit that this group accepts: blocks, at most num_blocks. O(1) for each block looked at."""
        find, number = self._pool.sides.find, self.number
        index, first = num_blocks - 1, self.first_block(num_blocks * self._block_size)
        while index >= first:
            if find(number, lineages[index]) is None:
                num_blocks = index  # every longer hit sees this block, too, as the first visible position never falls
                first = self.first_block(num_blocks * self._block_size)
            index -= 1
        return num_blocks

    def hit(self, lineages: Sequence[Lineage], num_blocks: int) -> list[BlockId]:
        """The blocks of an accepted hit, from the first visible one on."""
        first = self.first_block(num_blocks * self._block_size)
        found = (self._pool.sides.find(self.number, lineage) for lineage in lineages[first:num_blocks])
        return [block for block in found if block is not None]

    # -- tables --------------------------------------------------------------------------------------------------------

    def admit(self, request_id: RequestId, hit: Sequence[BlockId], num_blocks: int, promise: int) -> None:
        """A table that begins with an accepted hit of num_blocks. The blocks have been touched."""
        first = num_blocks - len(hit)
        self.tables[request_id] = SideTable([NULL_BLOCK] * first + list(hit), first)
        self.promises[request_id] = promise

    def num_missing(self, request_id: RequestId, num_tokens: int) -> int:
        """Blocks that a table lacks to cover num_tokens."""
        return max(0, cdiv(num_tokens, self._block_size) - len(self.tables[request_id].blocks))

    def extend(self, request_id: RequestId, num_tokens: int) -> None:
        """Cover num_tokens. The pool has the room."""
        missing = self.num_missing(request_id, num_tokens)
        if missing:
            self.tables[request_id].blocks += self._pool.allocate_side(self.number, missing)

    def take_new(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """The entries that the executor does not know yet, once."""
        table = self.tables[request_id]
        new = tuple(table.blocks[table.num_planned :])
        table.num_planned = len(table.blocks)
        return new

    def give_back(self, request_id: RequestId, num_computed_tokens: int, *, caught_up: bool) -> None:
        """Let go of what no later token sees. caught_up: every known token is computed, so the promise is kept."""
        table = self.tables[request_id]
        first = self.first_block(num_computed_tokens)
        if first > table.first:
            self._release(table, first)
        if caught_up:
            self.promises.pop(request_id, None)

    def _release(self, table: SideTable, stop: int) -> None:
        blocks = table.blocks[table.first : stop]
        table.blocks[table.first : stop] = [NULL_BLOCK] * len(blocks)
        table.first = stop
        self._pool.free_side(self.number, blocks[::-1], stop - 1)

    def free(self, request_id: RequestId) -> None:
        """Give every block back."""
        table = self.tables.pop(request_id)
        self.promises.pop(request_id, None)
        if table.num_held:
            self._release(table, len(table.blocks))
