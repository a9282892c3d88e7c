"""The scheduler's face of the cache: look up, admit, grow, stage, commit, withdraw, give back, free. Owns the tables.

Knows requests and blocks; must not know budgets, queues or who runs next. Tables only grow while a request runs,
so an executor needs only what was appended.

The **spine** is the group that sees everything: it says which beginnings are known. Where no layer is full attention,
it is *virtual*: entries without memory, in a pool of their own, whose ids no executor sees. Side groups and checkpoints
of recurrent state are found by the lineages of the spine; when it forgets a beginning, so do they.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from anaphora.core.block_pool import BlockPool
from anaphora.core.busy_prefixes import BusyPrefixes
from anaphora.core.capacity import Capacity
from anaphora.core.chain_maker import ChainMaker
from anaphora.core.checkpoints import Checkpoints
from anaphora.core.eviction import PolicyFactory
from anaphora.core.eviction.pinned import PinLimits
from anaphora.core.groups import CacheLayout
from anaphora.core.hashing import ExtraKey, HashFunction, sha256
from anaphora.core.hit import NO_HIT, Hit, accepted_hit
from anaphora.core.ids import NO_LINEAGE, BlockId, Lineage, RequestId, StateSlot, cdiv
from anaphora.core.request import Request
from anaphora.core.side_groups import SideGroups
from anaphora.core.staged import Staged
from anaphora.core.stats import GroupGauges
from anaphora.core.trail import left_behind
from anaphora.core.what_if import WhatIf
from anaphora.errors import ConfigError

_ENTRIES_PER_BLOCK = 8  # of a virtual spine: it remembers beginnings longer than the windows in the pool


class CacheManager:
    """Block tables of the live requests over one pool.

    num_blocks: usable blocks; the null block comes on top. layout: the groups of the model. num_state_slots: most
    checkpoints of recurrent state; without any, such a model caches nothing. state_checkpoint_interval: tokens, see
    core.checkpoints. root: digest of what the model is (hashing.root_digest).
    eviction_policy: a name in core.eviction.POLICIES, or what makes a policy. pin_limits: how much of the pool pins may
    hold. what_if: is told what is looked up and used; None keeps no curve. min_trail_blocks: what a request must leave
    for a trail (core.trail), 2 at least; more than the pool has for none.
    Raises ConfigError.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        layout: CacheLayout | None = None,
        num_state_slots: int = 0,
        state_checkpoint_interval: int = 512,
        root: bytes = b"",
        hash_function: HashFunction = sha256,
        enable_prefix_caching: bool = True,
        eviction_policy: str | PolicyFactory = "lru",
        pin_limits: PinLimits | None = None,
        what_if: WhatIf | None = None,
        min_trail_blocks: int = 32,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.layout = layout = CacheLayout() if layout is None else layout
        self.checkpoints: Checkpoints | None = None
        if layout.has_state:
            self.checkpoints = Checkpoints(num_state_slots, state_checkpoint_interval, block_size)
            enable_prefix_caching = enable_prefix_caching and num_state_slots > 0
        self.enable_prefix_caching = enable_prefix_caching
        kinds = layout.side_groups
        is_listened_to = bool(kinds) or layout.has_state
        self.pool = BlockPool(
            num_blocks,
            eviction_policy,
            pin_limits,
            num_side_groups=len(kinds),
            on_lost=self._lose if is_listened_to and layout.has_spine else None,
        )
        self.spine = self.pool
        if not layout.has_spine:
            self.spine = BlockPool(_ENTRIES_PER_BLOCK * num_blocks, eviction_policy, pin_limits, on_lost=self._lose)
        self.sides = SideGroups(kinds, self.pool, block_size)
        self.capacity = Capacity(num_blocks, self.spine.num_blocks, block_size, layout.has_spine, self.sides)
        self._has_sides = bool(kinds)
        self._is_plain = not kinds and not layout.has_state  # one group: nothing but the spine to ask
        self._nothing_staged = Staged([])
        self.what_if = what_if
        self.busy_prefixes = BusyPrefixes()
        self.chains = ChainMaker(root, block_size, hash_function, max_memo_blocks=self.spine.num_blocks)
        self._tables: dict[RequestId, list[BlockId]] = {}
        self._min_trail_blocks = max(2, min_trail_blocks)
        self._now_s = 0.0

    @property
    def root(self) -> bytes:
        """Digest of what the model is: the parent of every first block."""
        return self.chains.root

    def replace_root(self, root: bytes) -> None:
        """The model is another one from now on: later requests hang from this root and find nothing of before.

        The blocks of the old root stay where they are until they are evicted, O(1); requests registered before keep it.
        Pins end, as they would hold back room, and their limits, for what nobody can find.
        """
        self.chains.root = root
        self.spine.pins.expire(math.inf)

    def forget_prefix(self, tokens: array[int], extra_keys: Sequence[ExtraKey], oldest_alive: int | None) -> int:
        """No later request finds what begins with the full blocks of these tokens; returns how many tokens they hold.

        oldest_alive: the epoch of the live request that was registered first. Raises InvalidParameterError.
        """
        blocks_of = self.spine.index.blocks_of
        return self.chains.forget_prefix(tokens, extra_keys, lambda name: bool(blocks_of(name)), oldest_alive)

    @property
    def capacity_tokens(self) -> int:
        """Most tokens whose K/V the pool can hold for one request."""
        return self.capacity.num_tokens

    @property
    def num_available(self) -> int:
        """Free blocks that no running request was promised."""
        return self.pool.num_free - self.sides.num_owed if self._has_sides else self.pool.num_free

    def table(self, request_id: RequestId) -> Sequence[BlockId]:
        """The spine's block ids of a live request in order of position; empty if it holds none."""
        return self._tables.get(request_id, ())

    @property
    def tables(self) -> dict[RequestId, list[BlockId]]:
        """The spine's."""
        return self._tables

    def register(self, request: Request) -> None:
        """Hash the full blocks of what is known of a new request."""
        if self.enable_prefix_caching:
            request.chain = self.chains.make(request.tokens, request.extra_keys)
            request.epoch = self.chains.scopes.last

    # -- look-up and admission -----------------------------------------------------------------------------------------

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
        index = self.spine.index
        limit = self.max_hit_tokens(request) // self.block_size
        # A chain avoids what was forgotten before it was made, unless its request has generated its way there since.
        cut = self.chains.scopes.cut(request.chain.hashes, 0, limit, request.epoch)
        blocks, num_committed = index.find(request.chain, limit if cut is None else cut)
        if self._is_plain:
            return Hit(blocks, num_committed, len(blocks) * self.block_size)
        lineages = [index.lineages[block] for block in blocks]
        return accepted_hit(
            blocks, num_committed, lineages, self.block_size, self.sides, self.pool.sides, self.checkpoints
        )

    def num_free_needed(self, request: Request, hit: Hit, max_chunk: int | None = None) -> int:
        """Free blocks that an admission takes: new ones, and those of the hit that have no owner now.

        A side group asks for what the request will hold at once. max_chunk: most tokens of it in a step; None for all.
        """
        num_spine = cdiv(request.num_tokens, self.block_size) - len(hit.blocks)
        num_spine += len(self.spine.free_among(hit.blocks))
        return num_spine if self._is_plain else self._with_sides(num_spine, request, hit, max_chunk)

    def _with_sides(self, num_spine: int, request: Request, hit: Hit, max_chunk: int | None) -> int:
        num_needed = num_spine if self.spine is self.pool else 0
        if self._has_sides:
            chunk = self.capacity.chunk(request.num_tokens, max_chunk or request.num_tokens)
            num_needed += self.sides.num_needed(request.num_tokens, hit, chunk)
        return num_needed

    def admit(self, request: Request, hit: Hit, max_chunk: int | None = None) -> bool:
        """Give a request the blocks of its hit and room for every other known token: all or nothing.

        In the spine these are blocks; a side group is promised what it will hold at once, and `grow` gives it. False,
        and nothing has changed, if the pool lacks the room. max_chunk: most tokens of it in a step; None for all.
        """
        num_new = cdiv(request.num_tokens, self.block_size) - len(hit.blocks)
        free = self.spine.free_among(hit.blocks)
        num_spine = num_new + len(free)
        if num_spine > self.spine.num_free:
            return False
        if not self._is_plain and self._with_sides(num_spine, request, hit, max_chunk) > self.num_available:
            return False
        request_id = request.request_id
        if hit.blocks:
            self.spine.touch(hit.blocks, free)  # before allocating, which may evict whatever is free
        if self._has_sides:
            chunk = self.capacity.chunk(request.num_tokens, max_chunk or request.num_tokens)
            self.sides.admit(request_id, request.num_tokens, hit, chunk)
        self._tables[request_id] = hit.blocks + self.spine.allocate(num_new)
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
        if self.checkpoints is not None and hit.num_unused:
            self.checkpoints.part(request, hit.num_matched * self.block_size)
        return True

    def load_state(self, hit: Hit) -> StateSlot | None:
        """The checkpoint that an admission with this hit begins from."""
        return None if self.checkpoints is None or not hit.state_of else self.checkpoints.use(hit.state_of)

    def expect_follower(self, leader: Request, num_blocks: int) -> None:
        """Somebody waits for a running request to compute so many blocks: a state must be saved there."""
        if self.checkpoints is not None:
            self.checkpoints.part(leader, num_blocks * self.block_size)

    # -- while a request runs ------------------------------------------------------------------------------------------

    def chunk(self, request: Request, num_tokens: int) -> int:
        """How many of its next num_tokens a running request computes in one step: fewer where side groups could not
        hold them, or where a state is to be saved on the way. At least 1.
        """
        if self._is_plain:
            return num_tokens
        if self._has_sides:
            num_tokens = self.capacity.chunk(request.num_tokens, num_tokens)
        if self.checkpoints is not None and request.chain is not None:
            start = request.num_computed_tokens
            num_tokens = self.checkpoints.next_stop(request, start, start + num_tokens) - start
        return num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the tables to cover num_tokens. False, and nothing has changed, if the pool lacks the room."""
        table = self._tables[request.request_id]
        num_new = max(0, cdiv(num_tokens, self.block_size) - len(table))
        if not self._is_plain:
            num_side = self.sides.num_missing(request.request_id, num_tokens)
            if num_side + (num_new if self.spine is self.pool else 0) > self.pool.num_free:
                return False
        if num_new > self.spine.num_free:
            return False
        if num_new:
            table += self.spine.allocate(num_new)
        if not self._is_plain:
            self.sides.extend(request.request_id, num_tokens)
        return True

    def take_new_block_ids(self, request: Request) -> tuple[tuple[BlockId, ...], ...]:
        """For each group of the layout, the entries of the table that no plan has told of yet; they count as told."""
        if self.spine is not self.pool:
            return self.sides.take_new(request.request_id)
        table = self._tables[request.request_id]
        new = tuple(table[request.num_planned_blocks :])
        request.num_planned_blocks = len(table)
        return (new,) if self._is_plain else (new, *self.sides.take_new(request.request_id))

    def stage(self, request: Request, num_computed_tokens: int) -> Staged:
        """Make pending what the step in flight fills, up to num_computed_tokens."""
        first, stop = request.num_staged_blocks, num_computed_tokens // self.block_size
        if request.chain is None or stop <= first:
            return self._nothing_staged
        table = self._tables[request.request_id]
        blocks = table[first:stop]
        num_staged = self.spine.stage(blocks, request.chain, first, table[first - 1] if first else None)
        request.num_staged_blocks = stop
        blocks = blocks[:num_staged]
        if self._is_plain or not blocks:
            return Staged(blocks)
        lineages = self._lineages_of(blocks)
        sides = self.sides.stage(request.request_id, first, lineages)
        if self.checkpoints is None or (first + num_staged) * self.block_size != num_computed_tokens:
            return Staged(blocks, sides)
        slot = self.checkpoints.stage(request, num_computed_tokens, lineages[-1])
        return Staged(blocks, sides, NO_LINEAGE if slot is None else lineages[-1], slot)

    def _lineages_of(self, blocks: Sequence[BlockId]) -> list[Lineage]:
        lineages = self.spine.index.lineages
        return [lineages[block] for block in blocks]

    def commit(self, staged: Staged) -> None:
        """The step succeeded: its staged blocks are full and computed, so everyone may find them."""
        blocks = staged.blocks
        if not blocks:
            return
        self.spine.commit(blocks)
        if staged.sides:
            lineages = self._lineages_of(blocks)
            hashes = [self.spine.index.hashes[block] for block in blocks]
            self.sides.commit(lineages, hashes, staged.sides)  # type: ignore[arg-type]
        if self.checkpoints is not None and staged.save_state is not None:
            self.checkpoints.commit(staged.state_of)

    def withdraw(self, staged: Staged) -> None:
        """The step failed: what was staged for it is findable no more."""
        if staged.sides:
            self.sides.withdraw(self._lineages_of(staged.blocks), staged.sides)
        if self.checkpoints is not None and staged.save_state is not None:
            self.checkpoints.withdraw(staged.state_of)
        self.spine.withdraw(staged.blocks)

    def give_back(self, request: Request) -> None:
        """Let go of the blocks that no later token of a running request sees. While free, they stay findable."""
        if self._is_plain:
            return
        caught_up = request.num_computed_tokens >= request.num_tokens
        self.sides.give_back(request.request_id, request.num_computed_tokens, caught_up=caught_up)

    def free(self, request: Request) -> None:
        """Give every block of a request back, once. Committed blocks stay findable until they are reused."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            if self.what_if is not None and request.chain is not None:
                self.what_if.use(request.chain.hashes[: request.num_staged_blocks])
            if (pin := request.sampling.pin) is not None:
                priority, ttl_s = pin
                num_blocks = min(request.num_prompt_tokens // self.block_size, request.num_staged_blocks)
                self.spine.pins.pin(table[:num_blocks], priority, self._now_s + ttl_s, request.tenant)
            if request.num_staged_blocks >= self._min_trail_blocks:
                self._leave_trail(request, table)
            self.spine.free(table)
            if self._has_sides:
                self.sides.free(request.request_id)
            if self.checkpoints is not None:
                self.checkpoints.end(request.request_id)
        request.num_computed_tokens = 0
        request.num_staged_blocks = 0
        request.num_planned_blocks = 0

    def _leave_trail(self, request: Request, table: list[BlockId]) -> None:
        index, chain, slack = self.spine.index, request.chain, self._min_trail_blocks
        if chain is not None and not index.num_pending:  # some of these may be pending
            chain.trail = left_behind(chain.trail, table, request.num_staged_blocks, index.lineages, slack)

    # -- the cache as a whole ------------------------------------------------------------------------------------------

    def _lose(self, lineages: list[Lineage]) -> None:
        """No hit can need what is kept of a beginning that the spine has forgotten."""
        for lineage in lineages:
            self.pool.forget_sides(lineage)
            if self.checkpoints is not None:
                self.checkpoints.drop(lineage)

    def reset(self) -> bool:
        """Forget everything cached. False, and no effect, while a request holds blocks."""
        if self.spine.num_live or not self.pool.reset():
            return False
        if self.spine is not self.pool:
            self.spine.reset()
        if self.checkpoints is not None:
            self.checkpoints.clear()
        if self.what_if is not None:
            self.what_if.clear()
        return True

    def pass_time(self, now_s: float) -> None:
        """It is now_s, by any clock that does not go back: pins end and begin by it."""
        self._now_s = now_s
        self.spine.pins.expire(now_s)

    @property
    def num_pending(self) -> int:
        """Everything that the step in flight is to make findable; 0 between steps."""
        num_states = 0 if self.checkpoints is None else self.checkpoints.num_pending
        return self.spine.index.num_pending + self.pool.sides.num_pending + num_states

    def group_gauges(self) -> tuple[GroupGauges, ...]:
        """What each group of the layout holds now."""
        sides, gauges = self.pool.sides, self.sides.gauges()
        if self.spine is self.pool:
            num_live = self.pool.num_live - sum(sides.num_live)
            num_cached = self.pool.free_queue.num_cached - sum(sides.num_cached)
            gauges.insert(0, GroupGauges(str(self.layout.groups[0]), num_live, num_cached))
        return tuple(gauges)
