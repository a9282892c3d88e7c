"""What a request may find: the names of its blocks, the longest beginning to reuse, and what is counted of that.

    register    tokens -> names          look_up    names -> hit, nothing changes
    admitted    the hit is taken         leaves     the trail for who comes next

Knows requests, names and contents; must not know who owns a block, what is free, or the tables of live requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from anaphora.core.busy_prefixes import BusyPrefixes
from anaphora.core.chain_maker import ChainMaker
from anaphora.core.dependents import Dependents
from anaphora.core.hashing import ExtraKey
from anaphora.core.hit import NO_HIT, Hit
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex
from anaphora.core.request import Request
from anaphora.core.trail import left_behind
from anaphora.core.what_if import WhatIf


class Finder:
    """chains: makes the names. index: the spine's. dependents: what else has a say in a hit; None for nothing.

    is_enabled: off gives no request a chain, and who has none finds nothing. what_if, min_trail_blocks: see
    CacheManager. busy_prefixes: where hits end.
    """

    def __init__(
        self,
        chains: ChainMaker,
        index: PrefixIndex,
        block_size: int,
        dependents: Dependents | None,
        *,
        is_enabled: bool,
        what_if: WhatIf | None,
        min_trail_blocks: int,
    ) -> None:
        self.chains = chains
        self.what_if = what_if
        self.busy_prefixes = BusyPrefixes()
        self._index = index
        self._block_size = block_size
        self._dependents = dependents
        self._is_enabled = is_enabled
        self._min_trail_blocks = max(2, min_trail_blocks)

    def register(self, request: Request) -> None:
        """Hash the full blocks of what is known of a new request."""
        if self._is_enabled:
            request.chain = self.chains.make(request.tokens, request.extra_keys)
            request.epoch = self.chains.scopes.last

    def forget_prefix(self, tokens: array[int], extra_keys: Sequence[ExtraKey], oldest_alive: int | None) -> int:
        """No later request finds what begins with the full blocks of these tokens; returns how many tokens they hold.

        oldest_alive: the epoch of the live request that was registered first. Raises InvalidParameterError.
        """
        blocks_of = self._index.blocks_of
        return self.chains.forget_prefix(tokens, extra_keys, lambda name: bool(blocks_of(name)), oldest_alive)

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
        chain = request.chain
        if chain is None:
            return NO_HIT
        limit = self.max_hit_tokens(request) // self._block_size
        # A chain avoids what was forgotten before it was made, unless its request has generated its way there since.
        cut = self.chains.scopes.cut(chain.hashes, 0, limit, request.epoch)
        blocks, num_committed = self._index.find(chain, limit if cut is None else cut)
        if not blocks:
            return NO_HIT
        if self._dependents is None:
            return Hit(blocks, num_committed, len(blocks) * self._block_size)
        return self._dependents.accepted(blocks, num_committed)

    def admitted(self, request: Request, hit: Hit) -> None:
        """A request has taken its hit: count where it ends, and what a pool of another size would have found."""
        chain = request.chain
        if chain is None:
            return
        if hit.blocks and not request.was_admitted:
            self.busy_prefixes.found(chain.hashes[len(hit.blocks) - 1], hit.num_tokens)
        if self.what_if is not None:
            if request.was_admitted or request.bypasses_cache:
                self.what_if.use(chain.hashes)
            else:
                self.what_if.query(chain.hashes, request.num_tokens, self.max_hit_tokens(request) // self._block_size)

    def leaves(self, request: Request, table: list[BlockId]) -> None:
        """A request is about to give its table back: what it leaves is used, and found on a trail if it is long."""
        chain, num_staged = request.chain, request.num_staged_blocks
        if chain is None:
            return
        if self.what_if is not None:
            self.what_if.use(chain.hashes[:num_staged])
        if num_staged >= self._min_trail_blocks and not self._index.num_pending:  # some of these may be pending
            chain.trail = left_behind(chain.trail, table, num_staged, self._index.lineages, self._min_trail_blocks)
