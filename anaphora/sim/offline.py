"""The offline optimum as a bound: the leaf whose next use lies farthest ahead goes first (Belady, 1966).

It reads the future of one sequential replay, so it lives here and not in the core. A parent is used whenever its child
is, so its next use is never later: the order keeps a child before its parent by itself, ties aside.
"""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.core.eviction import PolicyFactory
from anaphora.core.eviction.leaf_heap import LeafHeap
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex
from anaphora.sim.chain import replayed_requests
from anaphora.sim.trace import Trace

OFFLINE_OPTIMUM = "offline"
_NEVER = 1 << 60


class _FarthestNextUse(LeafHeap):
    """next_uses: for each request in turn, its full blocks' next uses, head first."""

    def __init__(self, index: PrefixIndex, next_uses: list[list[int]]) -> None:
        super().__init__(index)
        self._next_uses = iter(next_uses)

    def _before_put(self, blocks: Sequence[BlockId], depth: int) -> None:
        for block, next_use in zip(blocks, reversed(next(self._next_uses)), strict=True):
            self._keys[block] = -next_use


def offline_optimum(trace: Trace, num_blocks: int, block_size: int, *, with_outputs: bool = False) -> PolicyFactory:
    """The policy for one sequential replay of `trace` with the same arguments, from its first request on."""
    capacity = num_blocks * block_size
    replayed = list(replayed_requests(trace, block_size, with_outputs=with_outputs))
    next_use_of: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for number in range(len(replayed) - 1, -1, -1):
        request = replayed[number]
        if request.num_input_tokens > capacity:
            continue  # refused
        ids = request.block_ids[: min(request.num_known_tokens, capacity) // block_size]
        if ids:
            next_uses.append([next_use_of.get(block_id, _NEVER) for block_id in ids])
            next_use_of.update(dict.fromkeys(ids, number))
    next_uses.reverse()
    return lambda index: _FarthestNextUse(index, next_uses)
