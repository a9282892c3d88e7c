"""A block chain whose names come from a trace instead of from tokens. The seam between traces and the core.

The core asks a chain for `hashes`, `contents` and `root`, and compares them; here both are the trace's ids, which name
whole beginnings. So the block pool, the index, the cache manager and the scheduler are the engine's own.
"""

from __future__ import annotations

from array import array
from typing import cast

from anaphora.core.hashing import BlockChain
from anaphora.core.ids import BlockHash


class TraceChain(BlockChain):
    """The ids of a request's full prompt blocks. Generated text has no ids, so the chain never grows."""

    __slots__ = ()

    def __init__(self, block_ids: list[int], block_size: int) -> None:
        # Not super().__init__: it prepares for hashing, which takes longer than all that a replay does with a chain.
        self.root = b""
        self.block_size = block_size
        self.token_ids = array("I")
        self.extra_keys = {}
        self.hashes = cast("list[BlockHash]", block_ids)
        self.contents = cast("list[bytes]", block_ids)

    def extend(self, token_ids: array[int], max_blocks: int | None = None) -> int:
        """Nothing to hash: 0."""
        return 0
