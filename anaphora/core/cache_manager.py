"""The scheduler's face of the cache: look up, admit, grow, stage, commit, withdraw, free. Owns the block tables.

Knows requests and blocks; must not know budgets, queues or who runs next. Tables only grow while a request runs,
so an executor needs only what was appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.core.block_pool import BlockPool
from anaphora.core.busy_prefixes import BusyPrefixes
from anaphora.core.chain_memo import ChainMemo
from anaphora.core.eviction import PolicyFactory
from anaphora.core.eviction.pinned import PinLimits
from anaphora.core.groups import AttentionGroup, FullAttention
from anaphora.core.hashing import BlockChain, HashFunction, sha256
from anaphora.core.ids import BlockId, RequestId
from anaphora.core.request import Request
from anaphora.core.what_if import WhatIf
from anaphora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Hit:
    """What a look-up found: leading blocks of a table; those after the first num_committed are pending."""

    blocks: list[BlockId]
    num_committed: int
    num_tokens: int


NO_HIT = Hit([], 0, 0)


class CacheManager:
    """Block tables of the live requests over one pool.

    num_blocks: usable blocks; the null block comes on top. root: digest of what the model is (hashing.root_digest).
    eviction_policy: a name in core.eviction.POLICIES, or what makes a policy. pin_limits: how much of the pool pins may
    hold. what_if: is told what is looked up and used; None keeps no curve.
    Raises ConfigError.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        root: bytes = b"",
        hash_function: HashFunction = sha256,
        enable_prefix_caching: bool = True,
        eviction_policy: str | PolicyFactory = "lru",
        pin_limits: PinLimits | None = None,
        what_if: WhatIf | None = None,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, eviction_policy, pin_limits)
        self.what_if = what_if
        self.busy_prefixes = BusyPrefixes()
        self.group: AttentionGroup = FullAttention(block_size)
        self._root = root
        self._hash_function = hash_function
        self._memo = ChainMemo(max_blocks=num_blocks)
        self._tables: dict[RequestId, list[BlockId]] = {}
        self._now_s = 0.0

    @property
    def root(self) -> bytes:
        """Digest of what the model is: the parent of every first block."""
        return self._root

    @property
    def capacity_tokens(self) -> int:
        """Most tokens whose K/V the pool can hold for one request."""
        return self.pool.num_blocks * self.block_size

    def table(self, request_id: RequestId) -> Sequence[BlockId]:
        """The block ids of a live request in order of position; empty if it holds none."""
        return self._tables.get(request_id, ())

    @property
    def tables(self) -> dict[RequestId, list[BlockId]]:
        return self._tables

    def register(self, request: Request) -> None:
        """Hash the full blocks of what is known of a new request."""
        if self.enable_prefix_caching:
            request.chain = BlockChain(self._root, self.block_size, self._hash_function, request.extra_keys)
            self._memo.fill(request.chain, request.tokens)

    def max_hit_tokens(self, request: Request) -> int:
        """The last known token is always computed, as its logits choose the next one.

        A request that scores its prompt needs the logits of every position: it may only find again what it computed
        before a preemption. One that pools every position finds nothing, as an executor forgets the preempted.
        """
        if request.pools_every_position:
            return 0
        return request.furthest_computed if request.is_scoring else request.num_tokens - 1

    def look_up(self, request: Request) -> Hit:
        """The longest reusable prefix, in whole blocks. Changes nothing."""
        if request.chain is None:
            return NO_HIT
        blocks, num_committed = self.group.longest_hit(self.pool.index, request.chain, self.max_hit_tokens(request))
        return Hit(blocks, num_committed, len(blocks) * self.block_size)

    def num_free_needed(self, request: Request, hit: Hit) -> int:
        """Free blocks that an admission takes: new ones, and those of the hit that have no owner now."""
        ref_counts = self.pool.ref_counts
        num_new = self.group.blocks_for(request.num_tokens) - len(hit.blocks)
        return num_new + sum(ref_counts[block] == 0 for block in hit.blocks)

    def admit(self, request: Request, hit: Hit) -> bool:
        """Give a request the blocks of its hit and new ones for every other known token: all or nothing.

        False, and nothing has changed, if the pool lacks the room.
        """
        pool = self.pool
        if self.num_free_needed(request, hit) > pool.num_free:
            return False
        pool.touch(hit.blocks)  # before allocating, which may evict whatever is free
        num_new = self.group.blocks_for(request.num_tokens) - len(hit.blocks)
        self._tables[request.request_id] = hit.blocks + pool.allocate(num_new)
        request.num_computed_tokens = hit.num_tokens
        request.num_staged_blocks = len(hit.blocks)
        if hit.blocks and request.chain is not None and not request.was_admitted:
            self.busy_prefixes.found(request.chain.hashes[len(hit.blocks) - 1], hit.num_tokens)
        if self.what_if is not None and request.chain is not None:
            if request.was_admitted or request.bypasses_cache:
                self.what_if.use(request.chain.hashes)
            else:
                most = self.max_hit_tokens(request) // self.block_size
                self.what_if.query(request.chain.hashes, request.num_tokens, most)
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the table to cover num_tokens. False, and nothing has changed, if the pool lacks the room."""
        table = self._tables[request.request_id]
        num_new = self.group.blocks_for(num_tokens) - len(table)
        if num_new > 0:
            if num_new > self.pool.num_free:
                return False
            table += self.pool.allocate(num_new)
        return True

    def stage(self, request: Request, num_computed_tokens: int) -> list[BlockId]:
        """Make the blocks pending that the step in flight fills, up to num_computed_tokens; returns them."""
        first, stop = request.num_staged_blocks, num_computed_tokens // self.block_size
        if request.chain is None or stop <= first:
            return []
        table = self._tables[request.request_id]
        blocks = table[first:stop]
        staged = self.pool.stage(blocks, request.chain, first, table[first - 1] if first else None)
        request.num_staged_blocks = stop
        return blocks[:staged]

    def commit(self, blocks: list[BlockId]) -> None:
        """The step succeeded: its staged blocks are full and computed, so everyone may find them."""
        self.pool.commit(blocks)

    def withdraw(self, blocks: list[BlockId]) -> None:
        """The step failed: what was staged for it is findable no more."""
        self.pool.withdraw(blocks)

    def free(self, request: Request) -> None:
        """Give every block of a request back, once. Committed blocks stay findable until they are reused."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            if self.what_if is not None and request.chain is not None:
                self.what_if.use(request.chain.hashes[: request.num_staged_blocks])
            if (pin := request.sampling.pin) is not None:
                priority, ttl_s = pin
                num_blocks = min(request.num_prompt_tokens // self.block_size, request.num_staged_blocks)
                self.pool.pins.pin(table[:num_blocks], priority, self._now_s + ttl_s, request.tenant)
            self.pool.free(table)
        request.num_computed_tokens = 0
        request.num_staged_blocks = 0
        request.num_planned_blocks = 0

    def reset(self) -> bool:
        """Forget every cached block. False, and no effect, while a request holds blocks."""
        done = self.pool.reset()
        if done and self.what_if is not None:
            self.what_if.clear()
        return done

    def pass_time(self, now_s: float) -> None:
        """It is now_s, by any clock that does not go back: pins end and begin by it."""
        self._now_s = now_s
        self.pool.pins.expire(now_s)
