"""Who of a step in the making computes what a waiting request needs next.

A request that is behind its known tokens has a *frontier*: the hash of the first full block that this step leaves to
later ones. Knows chains and hits; must not know who waits, or what a block holds.
"""

from __future__ import annotations

from anaphora.core.hashing import BlockChain
from anaphora.core.hit import Hit
from anaphora.core.ids import BlockHash
from anaphora.core.request import Request


class Frontier:
    """hash of a next block -> whose it is, and how many full blocks that request has after this step."""

    def __init__(self) -> None:
        self._by_hash: dict[BlockHash, tuple[Request, int]] = {}

    def add(self, request: Request, num_blocks: int) -> None:
        """A request with a chain has this many full blocks after this step."""
        assert request.chain is not None
        if num_blocks < len(request.chain.hashes):
            self._by_hash[request.chain.hashes[num_blocks]] = request, num_blocks

    def leader_of(self, request: Request, hit: Hit, most_shared: int) -> tuple[Request, int] | None:
        """Who computes this request's next block, and how many leading blocks the two share; None if nobody does.

        If the hit ends at somebody's frontier, and their contents agree up to there and beyond what that one has
        planned, it is cheaper to wait. most_shared: blocks, the longest hit that the request may have.
        """
        chain = request.chain
        if chain is None:
            return None
        leader, num_planned = self._find(chain, hit)
        if leader is None or leader.chain is None:
            return None
        shared = chain.common_blocks(leader.chain, most_shared)
        return (leader, shared) if shared > num_planned else None

    def _find(self, chain: BlockChain, hit: Hit) -> tuple[Request | None, int]:
        nobody = None, 0
        if not hit.num_unused:
            count = len(hit.blocks)
            return self._by_hash.get(chain.hashes[count], nobody) if count < len(chain.hashes) else nobody
        # The spine knows more than the hit could use: the furthest one on that way.
        ahead = [
            (leader, count)
            for block_hash, (leader, count) in self._by_hash.items()
            if len(hit.blocks) <= count <= hit.num_matched and chain.hashes[count : count + 1] == [block_hash]
        ]
        return max(ahead, key=lambda each: each[1], default=nobody)
