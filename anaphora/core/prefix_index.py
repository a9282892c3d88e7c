"""Which block holds which beginning. *The hash finds, the content confirms.*

Knows hashes, contents and block ids; must not know ref counts, the free queue or requests.

A **lineage** is the serial number of one exact beginning (root, tokens, extra keys, from block 0 up to and including
this block). Blocks with the same beginning share it; it is never given out twice. A block stores its own lineage and
its parent's, so "is this block's parent the block that I just confirmed?" is one comparison of integers, and it holds
even where two beginnings have the same hash: the second one is simply not indexed. A collision costs a miss.

    block state      blank ----stage----> pending ----commit----> committed ----remove----> blank
                       ^------withdraw------'
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import takewhile
from operator import is_not, itemgetter

from anaphora.core.hashing import BlockChain
from anaphora.core.ids import NULL_BLOCK, BlockHash, BlockId, Lineage

NO_LINEAGE = Lineage(0)
_FIRST_PIECE = 64


class PrefixIndex:
    """hash -> blocks, for the spine: the group that sees everything. Every operation is O(1) per block.

    copies: hash -> further committed blocks of the same content, where there is more than one.
    num_committed, num_duplicates: how often a block was committed, and of these, beside another of the same content.
    num_collisions: how often a block was not indexed because its hash names another content.
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: with the null block; block ids are in [0, num_blocks)."""
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        self._contents: list[bytes | None] = [None] * num_blocks
        self._lineages: list[Lineage] = [NO_LINEAGE] * num_blocks
        self._parents: list[Lineage] = [NO_LINEAGE] * num_blocks
        self._committed: dict[BlockHash, BlockId] = {}
        self.copies: dict[BlockHash, list[BlockId]] = {}
        self._pending: dict[BlockHash, BlockId] = {}
        self._roots: dict[bytes, Lineage] = {}
        self._last_lineage = NO_LINEAGE
        self.num_collisions = 0
        self.num_duplicates = 0
        self.num_committed = 0

    def __len__(self) -> int:
        """How many blocks are committed."""
        return len(self._committed) + sum(map(len, self.copies.values()))

    def find(self, chain: BlockChain, limit: int) -> tuple[list[BlockId], int]:
        """The longest confirmed chain from block 0, at most `limit` blocks: (blocks, how many are committed).

        The blocks after the committed ones are pending. Changes nothing.
        """
        hashes, contents = chain.hashes, chain.contents
        limit = min(limit, len(hashes))
        parent = self._roots.get(chain.root, NO_LINEAGE)
        found: list[BlockId] = []
        start, step = 0, _FIRST_PIECE
        while start < limit:  # in pieces, so that a miss at the start of a long prompt costs little
            stop = min(start + step, limit)
            piece = hashes[start:stop]
            try:  # all there, at C speed; twice the first one, as itemgetter gives a tuple for two or more only
                blocks: list[BlockId] = list(itemgetter(*piece, piece[0])(self._committed)[:-1])
            except KeyError:
                blocks = list(takewhile(partial(is_not, None), map(self._committed.get, piece)))  # type: ignore[arg-type]
            confirmed = self._confirm(blocks, contents[start : start + len(blocks)], parent)
            found += blocks[:confirmed]
            if confirmed < len(piece):
                break
            parent = self._lineages[blocks[-1]]
            start, step = stop, step * 4
        num_committed = len(found)
        if self._pending:
            parent = self._lineages[found[-1]] if found else self._roots.get(chain.root, NO_LINEAGE)
            for index in range(num_committed, limit):
                block = self._pending.get(hashes[index])
                if block is None or not self._is(block, contents[index], parent):
                    break
                found.append(block)
                parent = self._lineages[block]
        return found, num_committed

    def _confirm(self, blocks: list[BlockId], contents: list[bytes], parent: Lineage) -> int:
        """How many of `blocks`, from the first on, have these contents and continue each other from `parent`."""
        if not blocks:
            return 0
        # The null block makes up the number for itemgetter.
        get = itemgetter(*blocks, NULL_BLOCK)
        parents = get(self._parents)
        if (
            parents[0] == parent
            and parents[1:-1] == get(self._lineages)[:-2]
            and get(self._contents)[:-1] == tuple(contents)
        ):
            return len(blocks)
        for count, (block, content) in enumerate(zip(blocks, contents, strict=True)):
            if not self._is(block, content, parent):
                return count
            parent = self._lineages[block]
        return len(blocks)

    def _is(self, block: BlockId, content: bytes, parent: Lineage) -> bool:
        return self._parents[block] == parent and self._contents[block] == content

    def stage(self, blocks: list[BlockId], chain: BlockChain, first: int, previous: BlockId | None) -> int:
        """Make blocks findable within the step in flight: they hold blocks [first, first + len(blocks)) of `chain`.

        previous: the block before the first one in the same table, None if first is 0.
        Returns how many were staged: fewer than given where a hash names another content, or where `previous`
        itself is not indexed; what follows such a block cannot be found either.
        """
        if previous is not None:
            parent = self._lineages[previous]
            if parent == NO_LINEAGE:
                return 0
        else:
            parent = self._roots.get(chain.root, NO_LINEAGE) or self._new_root(chain.root)
        committed, pending = self._committed, self._pending
        all_hashes, all_contents = self.hashes, self._contents
        lineages, parents = self._lineages, self._parents
        count = len(blocks)
        hashes, contents = chain.hashes[first : first + count], chain.contents[first : first + count]
        last = self._last_lineage
        for done, (block, block_hash, content) in enumerate(zip(blocks, hashes, contents, strict=True)):
            twin = committed.get(block_hash)
            if twin is None:
                twin = pending.setdefault(block_hash, block)
            if twin == block:
                last = lineage = Lineage(last + 1)
            elif parents[twin] == parent and all_contents[twin] == content:
                lineage = lineages[twin]
                pending.setdefault(block_hash, block)  # a committed twin may be evicted for this very step
            else:
                self.num_collisions += 1
                count = done
                break
            all_hashes[block] = block_hash
            all_contents[block] = content
            parents[block] = parent
            lineages[block] = parent = lineage
        self._last_lineage = last
        return count

    def _new_root(self, root: bytes) -> Lineage:
        self._last_lineage = self._roots[root] = Lineage(self._last_lineage + 1)
        return self._last_lineage

    def commit(self, blocks: list[BlockId]) -> None:
        """Make staged blocks findable by everyone: their K/V are written and the step has succeeded."""
        all_hashes, committed, pending = self.hashes, self._committed, self._pending
        self.num_committed += len(blocks)
        for block in blocks:
            block_hash: BlockHash = all_hashes[block]  # type: ignore[assignment]
            if pending.get(block_hash) == block:
                del pending[block_hash]
            if committed.setdefault(block_hash, block) != block:
                self.copies.setdefault(block_hash, []).append(block)
                self.num_duplicates += 1

    def withdraw(self, blocks: list[BlockId]) -> None:
        """Take staged blocks back: the step that was to write them has failed."""
        for block in blocks:
            block_hash = self.hashes[block]
            if block_hash is not None and self._pending.get(block_hash) == block:
                del self._pending[block_hash]
            self._forget(block)

    def remove(self, block: BlockId) -> None:
        """Make a committed block unfindable. Another block of the same content takes its place, if there is one."""
        block_hash: BlockHash = self.hashes[block]  # type: ignore[assignment]
        copies = self.copies.get(block_hash)
        if copies is None:
            del self._committed[block_hash]
        else:
            if self._committed[block_hash] == block:
                self._committed[block_hash] = copies.pop()
            else:
                copies.remove(block)
            if not copies:
                del self.copies[block_hash]
        self._forget(block)

    def remove_all(self, blocks: list[BlockId]) -> None:
        """As remove, for several blocks of different contents, at C speed where none of them has a copy."""
        all_hashes, lineages = self.hashes, self._lineages
        hashes: list[BlockHash] = [all_hashes[block] for block in blocks]  # type: ignore[misc]
        if self.copies and not self.copies.keys().isdisjoint(hashes):
            for block in blocks:
                self.remove(block)
            return
        deque(map(self._committed.__delitem__, hashes), maxlen=0)
        for block in blocks:
            all_hashes[block] = None
            lineages[block] = NO_LINEAGE

    def remove_last(self, blocks: list[BlockId]) -> list[Lineage]:
        """As remove_all; returns the lineages that no committed block has any more."""
        before = [(self.hashes[block], self._lineages[block]) for block in blocks]
        self.remove_all(blocks)
        return [lineage for block_hash, lineage in before if block_hash not in self._committed]

    def _forget(self, block: BlockId) -> None:
        """A block without a hash: its content and parent are stale, and nobody comes to read them."""
        self.hashes[block] = None
        self._lineages[block] = NO_LINEAGE

    def blocks_of(self, block_hash: BlockHash) -> list[BlockId]:
        """Every committed block with this hash."""
        first = self._committed.get(block_hash)
        return [] if first is None else [first, *self.copies.get(block_hash, ())]

    @property
    def lineages(self) -> list[Lineage]:
        """Of each block, by id; to be read only. NO_LINEAGE where a block holds nothing; a side block's is negative."""
        return self._lineages

    @property
    def parents(self) -> list[Lineage]:
        """The lineage of each block's parent, by id; to be read only."""
        return self._parents

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def committed_lineages(self) -> set[Lineage]:
        """Costs time in proportion to the index."""
        return {self._lineages[block] for block in self._committed.values()}

    def inconsistencies(self) -> list[str]:
        """Equations between the tables of this index that do not hold. For tests; costs time in proportion to it."""
        broken = []
        committed = {block for block_hash in self._committed for block in self.blocks_of(block_hash)}
        hashed = {BlockId(block) for block, lineage in enumerate(self._lineages) if lineage > NO_LINEAGE}
        unnamed = [block for block in hashed if self.hashes[block] is None]
        if unnamed:
            broken.append(f"blocks {sorted(unnamed)} have a lineage and no hash")
        if len(committed) != len(self):
            broken.append("a block is in the index twice")
        if committed - hashed:
            broken.append(f"blocks {sorted(committed - hashed)} are in the index and have no hash")
        for block_hash in self._committed:
            for block in self.blocks_of(block_hash):
                if self.hashes[block] != block_hash:
                    broken.append(f"block {block} is indexed under a hash that is not its own")
        if not self._pending and hashed - committed:
            broken.append(f"blocks {sorted(hashed - committed)} have a hash and are not in the index")
        alive = {self._lineages[block] for block in hashed} | set(self._roots.values())
        for block in committed:
            if self._parents[block] not in alive:
                broken.append(f"block {block} outlives its parent: it can never be found")
        return broken
