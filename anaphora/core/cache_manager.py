"""The scheduler's face of the cache: look up, admit, grow, stage, commit, withdraw, give back, free. Owns the tables.

Knows requests and blocks; must not know budgets, queues or who runs next. Tables only grow while a request runs,
so an executor needs only what was appended. What a request may find is known by `finder`, what is kept of a beginning
besides the spine's blocks by `dependents`.

The **spine** is the group that sees everything: it says which beginnings are known. Where no layer is full attention,
it is *virtual*: entries without memory, in a pool of their own, whose ids no executor sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anaphora.core.block_pool import BlockPool
from anaphora.core.capacity import Capacity
from anaphora.core.chain_maker import ChainMaker
from anaphora.core.checkpoints import Checkpoints
from anaphora.core.dependents import Dependents
from anaphora.core.eviction import PolicyFactory
from anaphora.core.eviction.pinned import PinLimits
from anaphora.core.finder import Finder
from anaphora.core.groups import CacheLayout
from anaphora.core.hashing import HashFunction, sha256
from anaphora.core.hit import Hit
from anaphora.core.ids import BlockId, Lineage, RequestId, StateSlot, cdiv
from anaphora.core.request import Request
from anaphora.core.side_groups import SideGroups
from anaphora.core.staged import Staged
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
    for a trail (core.trail), 2 at least; more than the pool has for none. tables: of the spine, to be read only.
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
        is_alone = not kinds and not layout.has_state
        self.pool = BlockPool(
            num_blocks,
            eviction_policy,
            pin_limits,
            num_side_groups=len(kinds),
            on_lost=self._lose if not is_alone and layout.has_spine else None,
        )
        self.spine = self.pool
        if not layout.has_spine:
            self.spine = BlockPool(_ENTRIES_PER_BLOCK * num_blocks, eviction_policy, pin_limits, on_lost=self._lose)
        index = self.spine.index
        self.sides = SideGroups(kinds, self.pool, block_size)
        self.capacity = Capacity(num_blocks, self.spine.num_blocks, block_size, layout.has_spine, self.sides)
        self._dependents: Dependents | None = None  # of a spine that is alone
        if not is_alone:
            self._dependents = Dependents(self.pool, index, self.sides, self.checkpoints, self.capacity, block_size)
        self.finder = Finder(
            ChainMaker(root, block_size, hash_function, max_memo_blocks=self.spine.num_blocks),
            index,
            block_size,
            self._dependents,
            is_enabled=enable_prefix_caching,
            what_if=what_if,
            min_trail_blocks=min_trail_blocks,
        )
        self._nothing_staged = Staged([])
        self.tables: dict[RequestId, list[BlockId]] = {}
        self._now_s = 0.0

    @property
    def root(self) -> bytes:
        """Digest of what the model is: the parent of every first block."""
        return self.finder.chains.root

    def replace_root(self, root: bytes) -> None:
        """The model is another one from now on: later requests hang from this root and find nothing of before.

        The blocks of the old root stay where they are until they are evicted, O(1); requests registered before keep it.
        Pins end, as they would hold back room, and their limits, for what nobody can find.
        """
        self.finder.chains.root = root
        self.spine.pins.expire(math.inf)

    @property
    def capacity_tokens(self) -> int:
        """Most tokens whose K/V the pool can hold for one request."""
        return self.capacity.num_tokens

    @property
    def num_available(self) -> int:
        """Free blocks that no running request was promised."""
        return self.pool.num_free - self.sides.num_owed if self._dependents is not None else self.pool.num_free

    def table(self, request_id: RequestId) -> Sequence[BlockId]:
        """The spine's block ids of a live request in order of position; empty if it holds none."""
        return self.tables.get(request_id, ())

    # -- look-up and admission -----------------------------------------------------------------------------------------

    def register(self, request: Request) -> None:
        """See Finder.register."""
        self.finder.register(request)

    def look_up(self, request: Request) -> Hit:
        """See Finder.look_up."""
        return self.finder.look_up(request)

    def num_free_needed(self, request: Request, hit: Hit, max_chunk: int | None = None) -> int:
        """Free blocks that an admission takes: new ones, and those of the hit that have no owner now.

        A side group asks for what the request will hold at once. max_chunk: most tokens of it in a step; None for all.
        """
        num_spine = cdiv(request.num_tokens, self.block_size) - len(hit.blocks)
        num_spine += len(self.spine.free_among(hit.blocks))
        num_own = num_spine if self.spine is self.pool else 0
        return num_own if self._dependents is None else num_own + self._dependents.num_needed(request, hit, max_chunk)

    def admit(self, request: Request, hit: Hit, max_chunk: int | None = None) -> bool:
        """Give a request the blocks of its hit and room for every other known token: all or nothing.

        In the spine these are blocks; a side group is promised what it will hold at once, and `grow` gives it. False,
        and nothing has changed, if the pool lacks the room. max_chunk: most tokens of it in a step; None for all.
        """
        blocks, spine, dependents = hit.blocks, self.spine, self._dependents
        num_new = cdiv(request.num_tokens, self.block_size) - len(blocks)
        free = spine.free_among(blocks) if blocks else blocks
        num_spine = num_new + len(free)
        if num_spine > spine.num_free:
            return False
        if dependents is not None and self.num_free_needed(request, hit, max_chunk) > self.num_available:
            return False
        if blocks:
            spine.touch(blocks, free)  # before allocating, which may evict whatever is free
        if dependents is not None:
            dependents.admit(request, hit, max_chunk)
        self.tables[request.request_id] = blocks + spine.allocate(num_new)
        request.num_computed_tokens = hit.num_tokens
        request.num_staged_blocks = len(blocks)
        self.finder.admitted(request, hit)
        if dependents is not None and hit.num_unused:
            dependents.part(request, hit.num_matched)
        return True

    def load_state(self, hit: Hit) -> StateSlot | None:
        """The checkpoint that an admission with this hit begins from."""
        return None if self._dependents is None else self._dependents.load_state(hit)

    def expect_follower(self, leader: Request, num_blocks: int) -> None:
        """Somebody waits for a running request to compute so many blocks: a state must be saved there."""
        if self._dependents is not None:
            self._dependents.part(leader, num_blocks)

    # -- while a request runs ------------------------------------------------------------------------------------------

    def chunk(self, request: Request, num_tokens: int) -> int:
        """How many of its next num_tokens a running request computes in one step: fewer where side groups could not
        hold them, or where a state is to be saved on the way. At least 1.
        """
        return num_tokens if self._dependents is None else self._dependents.chunk(request, num_tokens)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the tables to cover num_tokens. False, and nothing has changed, if the pool lacks the room."""
        table = self.tables[request.request_id]
        num_new = max(0, cdiv(num_tokens, self.block_size) - len(table))
        if self._dependents is not None:
            num_side = self.sides.num_missing(request.request_id, num_tokens)
            if num_side + (num_new if self.spine is self.pool else 0) > self.pool.num_free:
                return False
        if num_new > self.spine.num_free:
            return False
        if num_new:
            table += self.spine.allocate(num_new)
        if self._dependents is not None:
            self.sides.extend(request.request_id, num_tokens)
        return True

    def take_new_block_ids(self, request: Request) -> tuple[tuple[BlockId, ...], ...]:
        """For each group of the layout, the entries of the table that no plan has told of yet; they count as told."""
        if self.spine is not self.pool:
            return self.sides.take_new(request.request_id)
        table = self.tables[request.request_id]
        new = tuple(table[request.num_planned_blocks :])
        request.num_planned_blocks = len(table)
        return (new,) if self._dependents is None else (new, *self.sides.take_new(request.request_id))

    def stage(self, request: Request, num_computed_tokens: int) -> Staged:
        """Make pending what the step in flight fills, up to num_computed_tokens."""
        first, stop, chain = request.num_staged_blocks, num_computed_tokens // self.block_size, request.chain
        if chain is None or stop <= first:
            return self._nothing_staged
        table = self.tables[request.request_id]
        blocks = table[first:stop]
        num_staged = self.spine.stage(blocks, chain, first, table[first - 1] if first else None)
        request.num_staged_blocks = stop
        if num_staged < stop - first:
            del blocks[num_staged:]
        if self._dependents is None or not blocks:
            return Staged(blocks)
        return self._dependents.stage(request, blocks, first, num_computed_tokens)

    def commit(self, staged: Staged) -> None:
        """The step succeeded: its staged blocks are full and computed, so everyone may find them."""
        if staged.blocks:
            self.spine.commit(staged.blocks)
            if self._dependents is not None:
                self._dependents.commit(staged)

    def withdraw(self, staged: Staged) -> None:
        """The step failed: what was staged for it is findable no more."""
        if self._dependents is not None:
            self._dependents.withdraw(staged)
        self.spine.withdraw(staged.blocks)

    def give_back(self, request: Request) -> None:
        """Let go of the blocks that no later token of a running request sees. While free, they stay findable."""
        if self._dependents is not None:
            self._dependents.give_back(request)

    def free(self, request: Request) -> None:
        """Give every block of a request back, once. Committed blocks stay findable until they are reused."""
        table = self.tables.pop(request.request_id, None)
        if table is not None:
            self.finder.leaves(request, table)
            if (pin := request.sampling.pin) is not None:
                priority, ttl_s = pin
                num_blocks = min(request.num_prompt_tokens // self.block_size, request.num_staged_blocks)
                self.spine.pins.pin(table[:num_blocks], priority, self._now_s + ttl_s, request.tenant)
            self.spine.free(table)
            if self._dependents is not None:
                self._dependents.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_staged_blocks = 0
        request.num_planned_blocks = 0

    # -- the cache as a whole ------------------------------------------------------------------------------------------

    def _lose(self, lineages: list[Lineage]) -> None:
        """The spine has forgotten these beginnings."""
        assert self._dependents is not None, "no other spine is listened to"
        self._dependents.lose(lineages)

    def reset(self) -> bool:
        """Forget everything cached. False, and no effect, while a request holds blocks."""
        if self.spine.num_live or not self.pool.reset():
            return False
        if self.spine is not self.pool:
            self.spine.reset()
        if self._dependents is not None:
            self._dependents.clear()
        if self.finder.what_if is not None:
            self.finder.what_if.clear()
        return True

    def pass_time(self, now_s: float) -> None:
        """It is now_s, by any clock that does not go back: pins end and begin by it."""
        self._now_s = now_s
        self.spine.pins.expire(now_s)

    @property
    def num_pending(self) -> int:
        """Everything that the step in flight is to make findable; 0 between steps."""
        num_own = self.spine.index.num_pending
        return num_own if self._dependents is None else num_own + self._dependents.num_pending
