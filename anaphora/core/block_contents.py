"""What each block holds: its name, what was hashed into it, the beginning that it ends, and the one before it.

Knows blocks by id and compares contents; must not know which names can be found, ref counts or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from operator import is_not, itemgetter

from anaphora.core.hashing import BlockChain
from anaphora.core.ids import NO_LINEAGE, NULL_BLOCK, BlockHash, BlockId, Lineage


class BlockContents:
    """Lists by block id. A block without a hash has NO_LINEAGE; its content and parent are stale, and nobody asks.

    lineages: a side block's is negative (side_index). parents: the lineage of the block before.
    """

    __slots__ = ("contents", "hashes", "lineages", "parents")

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: with the null block; block ids are in [0, num_blocks)."""
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        self.contents: list[bytes | None] = [None] * num_blocks
        self.lineages: list[Lineage] = [NO_LINEAGE] * num_blocks
        self.parents: list[Lineage] = [NO_LINEAGE] * num_blocks

    def forget(self, block: BlockId) -> None:
        self.hashes[block] = None
        self.lineages[block] = NO_LINEAGE

    def walk(
        self, names: Mapping[BlockHash, BlockId], chain: BlockChain, start: int, stop: int, parent: Lineage
    ) -> list[BlockId]:
        """The blocks of a chain from `start` to before `stop`, up to the first that is not there; confirmed one by one.

        parent: the lineage that the first one must continue.
        """
        parents, contents, lineages = self.parents, self.contents, self.lineages
        found = []
        for index in range(start, stop):
            block = names.get(chain.hashes[index])
            if block is None or parents[block] != parent or contents[block] != chain.contents[index]:
                break
            found.append(block)
            parent = lineages[block]
        return found

    def confirm(self, blocks: list[BlockId], contents: list[bytes], parent: Lineage) -> int:
        """How many of `blocks`, from the first on, have these contents and continue each other from `parent`."""
        if not blocks:
            return 0
        get = itemgetter(*blocks, NULL_BLOCK)  # the null block makes up the number for itemgetter
        parents = get(self.parents)
        if (
            parents[0] == parent
            and parents[1:-1] == get(self.lineages)[:-2]
            and get(self.contents)[:-1] == tuple(contents)
        ):
            return len(blocks)
        for count, (block, content) in enumerate(zip(blocks, contents, strict=True)):
            if self.parents[block] != parent or self.contents[block] != content:
                return count
            parent = self.lineages[block]
        return len(blocks)


def leading_blocks(committed: Mapping[BlockHash, BlockId], hashes: list[BlockHash]) -> list[BlockId]:
    """The blocks of a piece of a chain, one hash at least, up to the first one that is not committed.

    Who is committed has a committed parent, so the first one that is not is found by halving: but for collisions,
    where a name is there and its beginning is not.
    """
    low, high = 0, len(hashes)
    if hashes[-1] in committed:
        low = high
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in committed:
            low = middle + 1
        else:
            high = middle
    if not low:
        return []
    present = hashes[:low]
    try:  # at C speed; twice the first one, as itemgetter gives a tuple for two or more only
        return list(itemgetter(*present, present[0])(committed)[:-1])
    except KeyError:
        return list(takewhile(partial(is_not, None), map(committed.get, present)))  # type: ignore[arg-type]
