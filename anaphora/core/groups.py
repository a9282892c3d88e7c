"""What one kind of attention asks of the cache. A group is the layers that share one block table.

The seam for sliding windows, chunks and recurrent state: each kind says how long a hit it accepts and how many blocks
a length needs. One kind exists today.
"""

from __future__ import annotations

from typing import Protocol

from anaphora.core.hashing import BlockChain
from anaphora.core.ids import BlockId, cdiv
from anaphora.core.prefix_index import PrefixIndex


class AttentionGroup(Protocol):
    """One attention kind. Finds and counts; never changes state."""

    def longest_hit(self, index: PrefixIndex, chain: BlockChain, max_tokens: int) -> tuple[list[BlockId], int]:
        """The longest reusable prefix of at most max_tokens: (its blocks, how many of them are committed)."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """Entries of a block table that covers num_tokens."""
        ...


class FullAttention:
    """Every position sees every earlier one: a hit is a chain of blocks from block 0."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def longest_hit(self, index: PrefixIndex, chain: BlockChain, max_tokens: int) -> tuple[list[BlockId], int]:
        return index.find(chain, max_tokens // self.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size)
