"""What was hashed before is not hashed again. Keeps recent chains and copies what a new one has in common with them.

A chain is filed under the hash of its first block that it did not copy from another one: the places where sequences
part form a tree, and a new sequence walks down it: hash one block, find the chain that goes on from there, compare
tokens at memory speed, copy. Knows chains and tokens only; a memo that forgets costs time, never a wrong hash.

Exact, with any hash function: a hash is one object, made once and copied by reference. So "the same object at the same
place" means the same beginning, and the tokens after it are compared.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from anaphora.core.hashing import BlockChain
from anaphora.core.ids import BlockHash

_PIECE = 4096


def common_tokens(mine: array[int], other: array[int], start: int) -> int:
    """The first position from `start` on at which the two differ, or where the shorter one ends."""
    stop = min(len(mine), len(other))
    low = start
    while low < stop and mine[low : low + _PIECE] == other[low : low + _PIECE]:
        low += _PIECE
    if low >= stop:
        return max(start, stop)
    high = min(low + _PIECE, stop)
    while low < high:  # mine[start:low] agrees; the first difference is in [low, high]
        middle = (low + high + 1) // 2
        if mine[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class ChainMemo:
    """Recent chains, least recently used first out. max_blocks bounds the sum of their lengths."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._chains: OrderedDict[BlockHash, tuple[BlockChain, int]] = OrderedDict()  # and its length when filed

    def fill(self, chain: BlockChain, token_ids: array[int]) -> None:
        """Hash the full blocks of a new chain, copying what is known."""
        own = 0
        while chain.extend(token_ids, max_blocks=1):
            own = len(chain.hashes) - 1
            block_hash = chain.hashes[own]
            known, _ = self._chains.get(block_hash, (None, 0))
            if known is None or not self._copy(chain, known, own, token_ids):
                break
            self._chains.move_to_end(block_hash)
            own = len(chain.hashes)
        chain.extend(token_ids)
        if own < len(chain.hashes):
            self._file(chain, own)

    def _copy(self, chain: BlockChain, known: BlockChain, first: int, token_ids: array[int]) -> bool:
        """Take the blocks from `first` on over from a chain that has the same beginning, if it has."""
        if known.root != chain.root or known.extra_keys != chain.extra_keys:
            return False
        if first and (first > len(known.hashes) or known.hashes[first - 1] is not chain.hashes[first - 1]):
            return False
        block_size = chain.block_size
        shared = common_tokens(token_ids, known.token_ids, first * block_size) // block_size
        if shared <= first:
            return False
        chain.hashes[first:] = known.hashes[first:shared]
        chain.contents[first:] = known.contents[first:shared]
        return True

    def _file(self, chain: BlockChain, own: int) -> None:
        replaced = self._chains.pop(chain.hashes[own], None)
        if replaced is not None:
            self._num_blocks -= replaced[1]
        self._chains[chain.hashes[own]] = chain, len(chain.hashes)
        self._num_blocks += len(chain.hashes)
        while self._num_blocks > self._max_blocks:
            self._num_blocks -= self._chains.popitem(last=False)[1][1]
