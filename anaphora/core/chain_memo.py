"""What was hashed before is not hashed again. Keeps recent chains and copies what a new one has in common with them.

A chain is filed under the hash of its first block that it did not copy from another one: the places where sequences
part form a tree, and a new sequence walks down it: hash one block, find the chain that goes on from there, compare
tokens at memory speed, copy. Knows chains and tokens only; a memo that forgets costs time, never a wrong hash.

Exact, with any hash function: a block's hash depends on its parent's hash, its tokens and its extra keys alone. Where
two chains have one hash in common, and the tokens and extra keys after it, they have every hash after it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from anaphora.core.common_length import common_tokens
from anaphora.core.hashing import BlockChain
from anaphora.core.ids import BlockHash


class ChainMemo:
    """Recent chains, least recently used first out. max_blocks bounds the sum of their lengths."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._chains: OrderedDict[BlockHash, tuple[BlockChain, int]] = OrderedDict()  # and its length when filed

    def fill(self, chain: BlockChain, token_ids: array[int]) -> None:
        """Hash the full blocks of a new chain, copying what is known."""
        own = 0
        trodden = None  # the last chain on the way that has a trail
        while chain.extend(token_ids, 1):
            block_hash = chain.hashes[-1]
            filed = self._chains.get(block_hash)
            if filed is None or not self._copy(chain, known := filed[0], token_ids):
                break
            if known.trail is not None:
                trodden = known
            self._chains.move_to_end(block_hash)
            if len(chain.hashes) < len(known.hashes):  # it parts from the known one; else it goes on in its place
                own = len(chain.hashes)
        if trodden is not None:
            _take_trail(chain, trodden)
        chain.extend(token_ids)
        if own < len(chain.hashes):
            self._file(chain, own)

    def _copy(self, chain: BlockChain, known: BlockChain, token_ids: array[int]) -> bool:
        """Copy what follows in `known` on the chain's last hash, as far as tokens agree; False if it has not that hash.

        The last block itself is not copied: behind a collision its content is another one.
        """
        first = len(chain.hashes)
        if known.hashes[first - 1 : first] != chain.hashes[-1:]:
            return False
        shared = common_tokens(token_ids, known.token_ids, first * chain.block_size) // chain.block_size
        keyed = chain.num_equally_keyed(known)
        if keyed is not None:
            shared = max(first, min(shared, keyed))
        num_blocks = len(token_ids) // chain.block_size
        if shared == len(known.hashes) == num_blocks and chain.common_blocks(known, first) == first:
            chain.take_lists(known)
            return True
        chain.hashes += known.hashes[first:shared]
        chain.contents += known.contents[first:shared]
        return True

    def _file(self, chain: BlockChain, own: int) -> None:
        chains, name, length = self._chains, chain.hashes[own], len(chain.hashes)
        num_blocks = self._num_blocks + length
        if name in chains:
            num_blocks -= chains.pop(name)[1]
        chains[name] = chain, length
        while num_blocks > self._max_blocks:
            num_blocks -= chains.popitem(last=False)[1][1]
        self._num_blocks = num_blocks


def _take_trail(chain: BlockChain, known: BlockChain) -> None:
    """The trail of a known chain holds for a new one as far as their contents agree, whatever the hashes say."""
    assert known.trail is not None, "the caller has looked"
    count = chain.common_blocks(known, len(known.trail.blocks))
    if count > 1:
        chain.trail = known.trail.beginning(count)
