"""The seam between the pool and its eviction policies: which cached block without an owner is reused next.

A policy holds the *cached* free blocks and nothing else. It may read a block's hash, lineage and parent from the index,
and must not know requests, tokens, ref counts or the time of day: the same calls give the same order.

What every policy keeps (tests/core/test_policies.py):

    a block comes out exactly once, by `take`, `remove` or `pop_all`
    a child comes out of `take` before its parent, as a block without its parent can never be found
    a call costs O(1) a block, or O(log n) where its docstring says so
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex


class EvictionPolicy(Protocol):
    """The cached blocks that nobody owns, in some order of reuse."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BlockId]:
        """Every block once. In order of reuse where the policy has a fixed one, else in any order that repeats."""
        ...

    def put(self, blocks: Sequence[BlockId], depth: int) -> None:
        """Blocks of one table that have just lost their last owner, tail first. All are committed.

        depth: the place of the first of them in its table, counted from 0; the next one is one less deep, and so on.
        A hint for policies that weigh the cost of a block.
        """
        ...

    def remove(self, blocks: Sequence[BlockId]) -> None:
        """These blocks, parents first, have an owner again: somebody found them."""
        ...

    def discard(self, block: BlockId) -> None:
        """This block goes without having been found: another one holds the same content."""
        ...

    def take(self, count: int) -> list[BlockId]:
        """The next `count` blocks to reuse. There are as many. Their index entries are still there during the call."""
        ...

    def pop_all(self) -> list[BlockId]:
        """Every block, each child before its parent. Whatever was learnt from them may be kept."""
        ...


PolicyFactory = Callable[[PrefixIndex], EvictionPolicy]
"""Makes a policy for a pool, given the pool's index."""
