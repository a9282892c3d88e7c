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

from anaphora.core.block_contents import BlockContents, leading_blocks
from anaphora.core.hashing import BlockChain
from anaphora.core.ids import NO_LINEAGE, BlockHash, BlockId, Lineage
from anaphora.core.trail import Trail

_FEW = 8
_FIRST_PIECE = 64
_MIN_ROOTS = 64


class PrefixIndex:
    """hash -> blocks, for the spine: the group that sees everything. Every operation is O(1) per block.

    hashes, lineages, parents: by block id, to be read only; see core.block_contents.
    copies: hash -> further committed blocks of the same content, where there is more than one.
    num_committed, num_duplicates: how often a block was committed, and of these, beside another of the same content.
    num_collisions: how often a block was not indexed because its hash names another content.
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: with the null block; block ids are in [0, num_blocks)."""
        self._holds = BlockContents(num_blocks)
        self.hashes = self._holds.hashes
        self.lineages, self.parents = self._holds.lineages, self._holds.parents
        self._committed: dict[BlockHash, BlockId] = {}
        self.copies: dict[BlockHash, list[BlockId]] = {}
        self._pending: dict[BlockHash, BlockId] = {}
        self._staged_copies: set[BlockId] = set()  # staged blocks whose lineage is that of an earlier block
        self._are_pending_names_new = True  # each was committed nowhere and staged once since nothing was pending
        self._roots: dict[bytes, Lineage] = {}
        self._max_roots = _MIN_ROOTS
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
        hashes = chain.hashes
        if limit > len(hashes):
            limit = len(hashes)
        trail = chain.trail
        if not limit or (trail is None and hashes[0] not in self._committed and hashes[0] not in self._pending):
            return [], 0
        parent = self._roots.get(chain.root, NO_LINEAGE)
        found = [] if trail is None or self._staged_copies else self._on_the_trail(trail, limit)
        if len(found) < _FEW:
            last = self.lineages[found[-1]] if found else parent
            found += self._holds.walk(self._committed, chain, len(found), min(limit, _FEW), last)
        start, step = len(found), _FIRST_PIECE
        while _FEW <= start < limit:  # in pieces, so that a long one is confirmed while it is in the processor's cache
            stop = min(start + step, limit)
            blocks = leading_blocks(self._committed, hashes[start:stop])
            contents = chain.contents[start : start + len(blocks)]
            confirmed = self._holds.confirm(blocks, contents, self.lineages[found[-1]])
            found += blocks[:confirmed]
            if confirmed < stop - start:
                break
            start, step = stop, step * 4
        num_committed = len(found)
        if self._pending and num_committed < limit:
            parent = self.lineages[found[-1]] if found else parent
            found += self._holds.walk(self._pending, chain, num_committed, limit, parent)
        return found, num_committed

    def _on_the_trail(self, trail: Trail, limit: int) -> list[BlockId]:
        """Those that hold what they held, at most `limit`: each is committed, and confirmed by its lineage.

        A block that comes back to its lineage as a copy may be pending still: then nobody walks on trails.
        """
        return trail.blocks[: min(limit, trail.num_unchanged(self.lineages))]

    def stage(self, blocks: list[BlockId], chain: BlockChain, first: int, previous: BlockId | None) -> int:
        """Make blocks findable within the step in flight: they hold blocks [first, first + len(blocks)) of `chain`.

        previous: the block before the first one in the same table, None if first is 0.
        Returns how many were staged: fewer than given where a hash names another content, or where `previous`
        itself is not indexed; what follows such a block cannot be found either.
        """
        if previous is not None:
            parent = self.lineages[previous]
            if parent == NO_LINEAGE:
                return 0
        else:
            parent = self._roots.get(chain.root, NO_LINEAGE) or self._new_root(chain.root)
        count = len(blocks)
        hashes, contents = chain.hashes[first : first + count], chain.contents[first : first + count]
        committed, pending = self._committed, self._pending
        if committed.keys().isdisjoint(hashes) and (not pending or pending.keys().isdisjoint(hashes)):
            num_before = len(pending)
            self._write(blocks, hashes, contents, parent)
            if len(pending) == num_before + count:
                return count
            self.withdraw(blocks)  # two of them have one name
        return self._stage_one_by_one(blocks, hashes, contents, parent)

    def _write(self, blocks: list[BlockId], hashes: list[BlockHash], contents: list[bytes], parent: Lineage) -> None:
        """Make blocks pending whose names nobody has."""
        all_hashes, all_contents = self.hashes, self._holds.contents
        all_parents, all_lineages, pending = self.parents, self.lineages, self._pending
        first = self._last_lineage + 1
        stop = first + len(blocks)
        for block, block_hash, content, lineage in zip(blocks, hashes, contents, range(first, stop)):  # noqa: B905
            pending[block_hash] = block
            all_hashes[block] = block_hash
            all_contents[block] = content
            all_parents[block] = parent
            all_lineages[block] = parent = lineage  # type: ignore[call-overload, assignment]
        self._last_lineage = parent

    def _stage_one_by_one(
        self, blocks: list[BlockId], hashes: list[BlockHash], contents: list[bytes], parent: Lineage
    ) -> int:
        """Some of these names are taken: by the same beginning, or, in a collision, by another one."""
        self._are_pending_names_new = False
        committed, pending = self._committed, self._pending
        all_contents, lineages, parents = self._holds.contents, self.lineages, self.parents
        for done, (block, block_hash, content) in enumerate(zip(blocks, hashes, contents, strict=True)):
            twin = committed.get(block_hash)
            if twin is None:
                twin = pending.setdefault(block_hash, block)
            if twin == block:
                self._last_lineage = lineage = Lineage(self._last_lineage + 1)
            elif parents[twin] == parent and all_contents[twin] == content:
                lineage = lineages[twin]
                pending.setdefault(block_hash, block)  # a committed twin may be evicted for this very step
                self._staged_copies.add(block)
            else:
                self.num_collisions += 1
                return done
            self.hashes[block] = block_hash
            all_contents[block] = content
            parents[block] = parent
            lineages[block] = parent = lineage
        return len(blocks)

    def _new_root(self, root: bytes) -> Lineage:
        if len(self._roots) == self._max_roots:
            self._forget_bare_roots()
        self._last_lineage = self._roots[root] = Lineage(self._last_lineage + 1)
        return self._last_lineage

    def _forget_bare_roots(self) -> None:
        """Those that no block hangs from. If one comes back it is another lineage, so nothing of before is found again.

        O(blocks), and not again before as many roots as are left, and 64 more, have come.
        """
        parents = {parent for parent, lineage in zip(self.parents, self.lineages, strict=True) if lineage > NO_LINEAGE}
        self._roots = {root: lineage for root, lineage in self._roots.items() if lineage in parents}
        self._max_roots = 2 * len(self._roots) + _MIN_ROOTS

    def commit(self, blocks: list[BlockId]) -> None:
        """Make staged blocks findable by everyone: their K/V are written and the step has succeeded."""
        self.num_committed += len(blocks)
        if self._staged_copies:
            self._staged_copies.difference_update(blocks)
        committed, pending = self._committed, self._pending
        if self._are_pending_names_new and len(pending) == len(blocks) and list(pending.values()) == blocks:
            committed.update(pending)  # nobody else writes in this step
            pending.clear()
            return
        for block in blocks:
            block_hash: BlockHash = self.hashes[block]  # type: ignore[assignment]
            if pending.get(block_hash) == block:
                del pending[block_hash]
            if committed.setdefault(block_hash, block) != block:
                self.copies.setdefault(block_hash, []).append(block)
                self.num_duplicates += 1
        self._are_pending_names_new = self._are_pending_names_new or not (pending or self._staged_copies)

    def withdraw(self, blocks: list[BlockId]) -> None:
        """Take staged blocks back: the step that was to write them has failed."""
        self._staged_copies.difference_update(blocks)
        for block in blocks:
            block_hash = self.hashes[block]
            if block_hash is not None and self._pending.get(block_hash) == block:
                del self._pending[block_hash]
            self._holds.forget(block)
        self._are_pending_names_new = self._are_pending_names_new or not (self._pending or self._staged_copies)

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
        self._holds.forget(block)

    def remove_all(self, blocks: list[BlockId]) -> None:
        """As remove, for several blocks of different contents, at C speed where none of them has a copy."""
        all_hashes, lineages, committed = self.hashes, self.lineages, self._committed
        if self.copies and not self.copies.keys().isdisjoint([all_hashes[block] for block in blocks]):
            for block in blocks:
                self.remove(block)
            return
        for block in blocks:  # as remove and _forget, without the calls
            del committed[all_hashes[block]]  # type: ignore[arg-type]
            all_hashes[block] = None
            lineages[block] = NO_LINEAGE

    def remove_last(self, blocks: list[BlockId]) -> list[Lineage]:
        """As remove_all; returns the lineages that no committed block has any more."""
        before = [(self.hashes[block], self.lineages[block]) for block in blocks]
        self.remove_all(blocks)
        return [lineage for block_hash, lineage in before if block_hash not in self._committed]

    def blocks_of(self, block_hash: BlockHash) -> list[BlockId]:
        """Every committed block with this hash."""
        first = self._committed.get(block_hash)
        return [] if first is None else [first, *self.copies.get(block_hash, ())]

    def copied_among(self, blocks: list[BlockId]) -> list[BlockId]:
        """Those of these committed blocks, in their order, whose content is in another block, too."""
        hashes, copies = self.hashes, self.copies
        if _FEW * len(copies) < len(blocks):
            copied = {block for block_hash in copies for block in self.blocks_of(block_hash)}.intersection(blocks)
            if len(copied) < _FEW:
                return sorted(copied, key=blocks.index)
        return [block for block in blocks if hashes[block] in copies]

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def committed_lineages(self) -> set[Lineage]:
        """Costs time in proportion to the index."""
        return {self.lineages[block] for block in self._committed.values()}

    def inconsistencies(self) -> list[str]:
        """Equations between the tables of this index that do not hold. For tests; costs time in proportion to it."""
        broken = []
        committed = {block for block_hash in self._committed for block in self.blocks_of(block_hash)}
        hashed = {BlockId(block) for block, lineage in enumerate(self.lineages) if lineage > NO_LINEAGE}
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
        alive = {self.lineages[block] for block in hashed} | set(self._roots.values())
        for block in committed:
            if self.parents[block] not in alive:
                broken.append(f"block {block} outlives its parent: it can never be found")
            if self.parents[block] >= self.lineages[block]:
                broken.append(f"the lineage of block {block} is not above its parent's, as trails take for granted")
        return broken
