"""Block chains whose names come from a trace instead of from tokens. The seam between traces and the core.

The core asks a chain for `hashes`, `contents` and `root`, and compares them; here both are the trace's ids, which name
whole beginnings. So the block pool, the index, the cache manager and the scheduler are the engine's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple, cast

from anaphora.core.hashing import BlockChain
from anaphora.core.ids import BlockHash
from anaphora.sim.trace import Trace


class TraceChain(BlockChain):
    """The ids of a request's full blocks: at first those of its prompt, more as its tokens become known."""

    __slots__ = ("_ids",)

    def __init__(self, block_ids: list[int], block_size: int, num_prompt_blocks: int | None = None) -> None:
        """num_prompt_blocks: how many are known from the start; None is all of them."""
        # Not super().__init__: it prepares for hashing, which takes longer than all that a replay does with a chain.
        self.root = b""
        self.block_size = block_size
        self.token_ids = array("I")
        self.extra_keys = {}
        self.trail = None
        self._ids = block_ids
        known = block_ids if num_prompt_blocks is None else block_ids[:num_prompt_blocks]
        self.hashes = cast("list[BlockHash]", known)
        self.contents = cast("list[bytes]", known)

    def extend(self, token_ids: array[int], max_blocks: int | None = None) -> int:
        """Name the blocks that these tokens fill; there is nothing to hash."""
        first, stop = len(self.hashes), len(token_ids) // self.block_size
        if stop > first:
            self.hashes += cast("list[BlockHash]", self._ids[first:stop])  # contents is the same list
        return len(self.hashes) - first


class ReplayedRequest(NamedTuple):
    """What a replay needs of one trace entry.

    num_known_tokens: of the prompt, and of the output as far as it is computed. block_ids: of their full blocks.
    """

    num_input_tokens: int
    num_known_tokens: int
    block_ids: list[int]


def replayed_requests(trace: Trace, block_size: int, *, with_outputs: bool) -> Iterator[ReplayedRequest]:
    """Every request of a trace for a replay at this block size.

    Generated blocks that the trace has no ids for get names that never come again: as in the engine, they stay in the
    pool after their request and nobody asks for them.
    """
    unseen = count(-1, -1)
    for request in trace.requests:
        if with_outputs:
            ids = trace.known_block_ids(request, block_size)
            known = request.known_length
            ids += [next(unseen) for _ in range(known // block_size - len(ids))]
        else:
            ids = trace.block_ids(request, block_size)
            known = request.input_length
        yield ReplayedRequest(request.input_length, known, ids)
