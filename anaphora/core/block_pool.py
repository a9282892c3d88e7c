"""The pool of K/V blocks: who owns each one and what it holds. All five verbs that change blocks are here.

    allocate   free queue -> one owner       (a cached block is evicted first)
    commit     pending -> findable by all
    touch      one more owner, out of the free queue
    free       one owner less, at zero into the free queue; the hash stays
    evict      take the hash away (only without owners)

Knows blocks and beginnings; must not know requests, tokens to schedule or tensors. State is indexed by block id.
"""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.core.eviction import PolicyFactory, policy_factory
from anaphora.core.eviction.pinned import PinLimits, Pinned
from anaphora.core.free_queue import FreeQueue
from anaphora.core.hashing import BlockChain
from anaphora.core.ids import NULL_BLOCK, BlockId
from anaphora.core.prefix_index import PrefixIndex
from anaphora.errors import ConfigError


class BlockPool:
    """`num_blocks` usable blocks, ids 1 to num_blocks, and the null block 0.

    policy: which cached block without an owner goes next: a name (core.eviction.POLICIES) or what makes one.
    pins: over that policy, what requests asked to keep longer; see core.eviction.pinned.
    ref_counts: owners of each block, by id. num_evicted: blocks that lost their hash so that another could use them.
    Raises ConfigError.
    """

    def __init__(
        self, num_blocks: int, policy: str | PolicyFactory = "lru", pin_limits: PinLimits | None = None
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least one usable block, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts: list[int] = [0] * (num_blocks + 1)
        self.index = PrefixIndex(num_blocks + 1)
        make_policy = policy_factory(policy) if isinstance(policy, str) else policy
        self.pins = Pinned(make_policy(self.index), self.index, num_blocks, pin_limits or PinLimits())
        self.free_queue = FreeQueue(num_blocks, self.pins)
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks without an owner: all that an allocation can get, blank or cached."""
        return len(self.free_queue)

    @property
    def num_live(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - len(self.free_queue)

    def allocate(self, count: int) -> list[BlockId]:
        """`count` blocks with one owner each and nothing findable in them. The caller has checked `num_free`."""
        assert count <= self.num_free, "the cache manager checks num_free before it allocates"
        if count == 0:
            return []
        blocks, cached = self.free_queue.take(count)
        if cached:
            self._evict(cached)
            blocks += cached
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def _evict(self, blocks: list[BlockId]) -> None:
        """Take the index entries away *before* the blocks are given out, so that no one finds what is overwritten."""
        self.index.remove_all(blocks)
        self.num_evicted += len(blocks)

    def touch(self, blocks: Sequence[BlockId]) -> None:
        """One more owner for each of these found blocks."""
        ref_counts = self.ref_counts
        free = [block for block in blocks if ref_counts[block] == 0]
        if free:
            self.free_queue.cached.remove(free)
        for block in blocks:
            ref_counts[block] += 1

    def free(self, table: Sequence[BlockId]) -> None:
        """One owner less for each block of a table, its tail first, so that a child is evicted before its parent."""
        ref_counts, hashes, copies = self.ref_counts, self.index.hashes, self.index.copies
        blank: list[BlockId] = []
        cached: list[BlockId] = []
        for block in reversed(table):
            if block == NULL_BLOCK:
                continue
            left = ref_counts[block] = ref_counts[block] - 1
            if left == 0:
                if hashes[block] is None:
                    blank.append(block)
                elif copies and hashes[block] in copies:
                    spare = self._spare_copy(block)
                    blank.append(spare)
                    if spare != block:
                        cached.append(block)
                else:
                    cached.append(block)
        self.free_queue.put_blank(blank)
        if cached:
            self.free_queue.cached.put(cached, table.index(cached[0]))

    def _spare_copy(self, block: BlockId) -> BlockId:
        """Keep at most one free block of each content, the latest released: a second one would only push others out.

        Returns the one that is now blank.
        """
        others = self.index.blocks_of(self.index.hashes[block])  # type: ignore[arg-type]
        spare = next((other for other in others if other != block and self.ref_counts[other] == 0), None)
        if spare is None:  # every other one has an owner and stays findable
            spare = block
        else:
            self.free_queue.cached.discard(spare)
        self.index.remove(spare)
        return spare

    def stage(self, blocks: list[BlockId], chain: BlockChain, first: int, previous: BlockId | None) -> int:
        """See PrefixIndex.stage."""
        return self.index.stage(blocks, chain, first, previous)

    def commit(self, blocks: list[BlockId]) -> None:
        """See PrefixIndex.commit."""
        self.index.commit(blocks)

    def withdraw(self, blocks: list[BlockId]) -> None:
        """See PrefixIndex.withdraw. The blocks keep their owners."""
        self.index.withdraw(blocks)

    def reset(self) -> bool:
        """Evict everything. False, and nothing changes, while any block has an owner. Not counted as evictions."""
        if self.num_live:
            return False
        blocks = self.free_queue.cached.pop_all()
        self.index.remove_all(blocks)
        self.free_queue.put_blank(blocks)
        return True
