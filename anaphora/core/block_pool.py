"""The pool of K/V blocks: who owns each one and what it holds. All five verbs that change blocks are here.

    allocate   free queue -> one owner       (a cached block is evicted first)
    commit     pending -> findable by all
    touch      one more owner, out of the free queue
    free       one owner less, at zero into the free queue; the hash stays
    evict      take the hash away (only without owners)

Blocks of every group come from here. Those of the *spine*, the group that sees everything, are found by content
(`index`), those of the *side groups* by the spine's lineages (`sides`).

Knows blocks and beginnings; must not know requests, tokens to schedule or tensors. State is indexed by block id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anaphora.core.eviction import PolicyFactory, policy_factory
from anaphora.core.eviction.pinned import PinLimits, Pinned
from anaphora.core.free_queue import FreeQueue
from anaphora.core.hashing import BlockChain
from anaphora.core.ids import NO_LINEAGE, NULL_BLOCK, BlockHash, BlockId, Lineage
from anaphora.core.prefix_index import PrefixIndex
from anaphora.core.side_index import SideIndex
from anaphora.errors import ConfigError


class BlockPool:
    """`num_blocks` usable blocks, ids 1 to num_blocks, and the null block 0.

    policy: which cached block without an owner goes next: a name (core.eviction.POLICIES) or what makes one.
    pins: over that policy, what requests asked to keep longer; see core.eviction.pinned.
    num_side_groups: see core.side_index. on_lost: is told which beginnings the spine has lost by an eviction, before
    the evicted blocks are given out; it may call forget_sides.
    ref_counts: owners of each block, by id. num_free: blocks without one: all that an allocation can get, blank or
    cached. num_evicted: blocks that lost their hash so that another could use them.
    Raises ConfigError.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: str | PolicyFactory = "lru",
        pin_limits: PinLimits | None = None,
        *,
        num_side_groups: int = 0,
        on_lost: Callable[[list[Lineage]], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least one usable block, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts: list[int] = [0] * (num_blocks + 1)
        self.index = PrefixIndex(num_blocks + 1)
        self.sides = SideIndex(self.index, num_side_groups)
        self._on_lost = on_lost
        make_policy = policy_factory(policy) if isinstance(policy, str) else policy
        self.pins = Pinned(make_policy(self.index), self.index, num_blocks, pin_limits or PinLimits())
        self.free_queue = FreeQueue(num_blocks, self.pins)
        self.num_free = num_blocks
        self.num_evicted = 0

    @property
    def num_live(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[BlockId]:
        """`count` blocks with one owner each and nothing findable in them. The caller has checked `num_free`."""
        assert count <= self.num_free, "the cache manager checks num_free before it allocates"
        if count == 0:
            return []
        self.num_free -= count
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
        self.num_evicted += len(blocks)
        if self.sides.num_groups:
            blocks = self._evict_sides(blocks)
        if self._on_lost is None:
            self.index.remove_all(blocks)
        else:
            self._on_lost(self.index.remove_last(blocks))

    def _evict_sides(self, blocks: list[BlockId]) -> list[BlockId]:
        """Take the entries of the side blocks among these away; returns the spine's."""
        sides = self.sides
        spine = []
        for block in blocks:
            if sides.is_labelled(block):
                sides.num_cached[sides.group_of(block)] -= 1
                sides.remove(block)
            else:
                spine.append(block)
        return spine

    def free_among(self, blocks: Sequence[BlockId]) -> Sequence[BlockId]:
        """Those of these blocks that have no owner; the same list if none has one."""
        ref_counts = self.ref_counts
        owners = [ref_counts[block] for block in blocks]
        if owners == [0] * len(blocks):
            return blocks
        return [block for block, count in zip(blocks, owners, strict=True) if not count]

    def touch(self, blocks: Sequence[BlockId], free: Sequence[BlockId] | None = None) -> None:
        """One more owner for each of these found blocks. free: those that have none, where the caller knows."""
        ref_counts = self.ref_counts
        if free is None:
            free = self.free_among(blocks)
        if free:
            self.num_free -= len(free)
            self.free_queue.cached.remove(free)
        if len(free) == len(blocks):
            for block in blocks:
                ref_counts[block] = 1
        else:
            for block in blocks:
                ref_counts[block] += 1

    def free(self, table: list[BlockId]) -> None:
        """One owner less for each block of a table, its tail first, so that a child is evicted before its parent."""
        ref_counts, lineages = self.ref_counts, self.index.lineages
        if [ref_counts[block] for block in table] == [1] * len(table):
            freed = table
            for block in freed:
                ref_counts[block] = 0
        else:  # some have other owners, or are null blocks
            freed = [block for block in table if ref_counts[block] == 1]
            for block in table:
                ref_counts[block] -= 1
            ref_counts[NULL_BLOCK] = 0
        self.num_free += len(freed)
        stop = len(freed)  # what is findable of a table is a beginning of it
        while stop and lineages[freed[stop - 1]] == NO_LINEAGE:
            stop -= 1
        blank, cached = freed[stop:], freed[:stop]
        blank.reverse()
        cached.reverse()
        if self.index.copies and cached:
            self._spare_copies(cached, blank)
        if blank:
            self.free_queue.put_blank(blank)
        if cached:
            depth = len(table) - 1
            while table[depth] != cached[0]:
                depth -= 1
            self.free_queue.cached.put(cached, depth)

    def _spare_copies(self, cached: list[BlockId], blank: list[BlockId]) -> None:
        """Of released blocks that are findable, make those blank that are copies, or the copies that they replace."""
        for block in self.index.copied_among(cached):
            spare = self._spare_copy(block)
            blank.append(spare)
            if spare == block:
                cached.remove(block)

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
        side_blocks = set(self.sides.clear())
        self.sides.num_cached = [0] * self.sides.num_groups
        self.index.remove_all([block for block in blocks if block not in side_blocks] if side_blocks else blocks)
        self.free_queue.put_blank(blocks)
        return True

    # -- side groups ---------------------------------------------------------------------------------------------------

    def allocate_side(self, group: int, count: int) -> list[BlockId]:
        """As allocate."""
        self.sides.num_live[group] += count
        return self.allocate(count)

    def touch_side(self, group: int, blocks: Sequence[BlockId]) -> None:
        """As touch."""
        free = self.free_among(blocks)
        self.sides.num_live[group] += len(free)
        self.sides.num_cached[group] -= len(free)
        self.touch(blocks, free)

    def commit_side(self, group: int, lineages: list[Lineage], hashes: list[BlockHash], blocks: list[BlockId]) -> None:
        """These blocks hold this group's K/V of the last block of these beginnings. They replace those that did."""
        self.sides.end_pending(group, lineages, blocks)
        for lineage, block_hash, block in zip(lineages, hashes, blocks, strict=True):
            self._forget_side(group, lineage)
            self.sides.put(group, lineage, block_hash, block)

    def free_side(self, group: int, blocks: Sequence[BlockId], depth: int) -> None:
        """One owner less for each of these blocks of one table, its tail first; depth: the place of the first."""
        ref_counts, hashes = self.ref_counts, self.index.hashes
        blank: list[BlockId] = []
        cached: list[BlockId] = []
        for block in blocks:
            left = ref_counts[block] = ref_counts[block] - 1
            if left == 0:
                (blank if hashes[block] is None else cached).append(block)
        self.num_free += len(blank) + len(cached)
        self.sides.num_live[group] -= len(blank) + len(cached)
        self.free_queue.put_blank(blank)
        if cached:
            self.sides.num_cached[group] += len(cached)
            self.free_queue.cached.put(cached, depth)

    def forget_sides(self, lineage: Lineage) -> None:
        """The spine has lost this beginning, so no hit needs any side group's block of it."""
        for group in range(self.sides.num_groups):
            self.num_evicted += self._forget_side(group, lineage)

    def _forget_side(self, group: int, lineage: Lineage) -> bool:
        """Take the entry of a committed block away; without an owner it is blank. Returns whether it had none."""
        block = self.sides.committed(group, lineage)
        if block is None:
            return False
        is_free = self.ref_counts[block] == 0
        if is_free:
            self.free_queue.cached.discard(block)  # reads the label
            self.free_queue.put_blank((block,))
            self.sides.num_cached[group] -= 1
        self.sides.remove(block)
        return is_free
