"""What all policies but LRU share: which blocks may go. Only a *leaf* may: a block none of whose children is free.

A block with an owner has parents with an owner, so a parent is never asked for while a child of it is in use.

    put, tail first     the tail is a leaf; those before it are not, as their child is here
    take                a leaf goes; its parent becomes a leaf, if that was its last child

Knows lineages (one exact beginning each) and nothing of what makes a leaf worth keeping: subclasses order the leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from anaphora.core.ids import NO_LINEAGE, BlockId, Lineage
from anaphora.core.prefix_index import PrefixIndex


class LeafPolicy(ABC):
    """The tree of free cached blocks, by lineage. O(1) a block, besides what the subclass takes."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._lineages, self._parents = index.lineages, index.parents
        self._block_of: dict[Lineage, BlockId] = {}  # at most one free block has a lineage: the pool sees to it
        self._seen: list[Lineage] = [NO_LINEAGE] * len(index.hashes)
        self._num_children: dict[Lineage, int] = {}  # free children of a lineage, whether it is free itself or not

    def __len__(self) -> int:
        return len(self._block_of)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._block_of.values())

    def put(self, blocks: Sequence[BlockId], depth: int) -> None:
        lineages, parents = self._lineages, self._parents
        block_of, num_children = self._block_of, self._num_children
        self._before_put(blocks, depth)
        for block in blocks:
            lineage, parent = lineages[block], parents[block]
            block_of[lineage] = block
            num_children[parent] = num_children.get(parent, 0) + 1
            if lineage not in num_children:
                self._add_leaf(block)

    def remove(self, blocks: Sequence[BlockId]) -> None:
        self._before_remove(blocks)
        for block in blocks:
            self._leave(block)

    def discard(self, block: BlockId) -> None:
        self._leave(block)

    def _leave(self, block: BlockId) -> None:
        lineage = self._lineages[block]
        del self._block_of[lineage]
        if lineage not in self._num_children:
            self._remove_leaf(block)
        self._child_left(self._parents[block])

    def _child_left(self, parent: Lineage) -> None:
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return
        del self._num_children[parent]
        block = self._block_of.get(parent)
        if block is not None:
            self._add_leaf(block)

    def take(self, count: int) -> list[BlockId]:
        lineages, parents = self._lineages, self._parents
        block_of, num_children = self._block_of, self._num_children
        evict_leaf, add_leaf = self._evict_leaf, self._add_leaf
        taken = []
        for _ in range(count):
            block = evict_leaf()
            taken.append(block)
            del block_of[lineages[block]]
            parent = parents[block]  # from here on as _child_left, without the call
            left = num_children[parent] - 1
            if left:
                num_children[parent] = left
                continue
            del num_children[parent]
            if parent in block_of:
                add_leaf(block_of[parent])
        return taken

    def pop_all(self) -> list[BlockId]:
        return self.take(len(self))

    def _is_new(self, block: BlockId) -> bool:
        """Whether a block that comes holds other content than when it came last. True once for each content."""
        lineage = self._lineages[block]
        if self._seen[block] == lineage:
            return False
        self._seen[block] = lineage
        return True

    # -- what a subclass says ------------------------------------------------------------------------------------------

    @abstractmethod
    def _before_put(self, blocks: Sequence[BlockId], depth: int) -> None:
        """Blocks come, tail first; those that are leaves are added next."""

    def _before_remove(self, blocks: Sequence[BlockId]) -> None:  # noqa: B027  (most have nothing to do)
        """Blocks, parents first, are about to leave because somebody found them."""

    @abstractmethod
    def _add_leaf(self, block: BlockId) -> None: ...

    @abstractmethod
    def _remove_leaf(self, block: BlockId) -> None: ...

    @abstractmethod
    def _evict_leaf(self) -> BlockId:
        """The leaf that goes next, no longer among the leaves. There is one; the index still knows its content."""
