"""From tokens and extra keys to a chain of names: under the root of now, and apart from what was forgotten.

Knows roots, chains, scopes and the memo; must not know blocks or requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from anaphora.core.chain_memo import ChainMemo
from anaphora.core.hashing import BlockChain, ExtraKey, HashFunction
from anaphora.core.ids import BlockHash
from anaphora.core.scopes import Scopes
from anaphora.errors import InvalidParameterError


class ChainMaker:
    """root: digest of what the model is; may be replaced, and later chains hang from the new one. max_memo_blocks: see
    core.chain_memo.
    """

    def __init__(self, root: bytes, block_size: int, hash_function: HashFunction, max_memo_blocks: int) -> None:
        self.root = root
        self.scopes = Scopes()
        self._block_size = block_size
        self._hash_function = hash_function
        self._memo = ChainMemo(max_memo_blocks)

    def make(self, tokens: array[int], extra_keys: Sequence[ExtraKey]) -> BlockChain:
        """The chain of a new request, every full block of it hashed."""
        return self._make(tokens, extra_keys, len(tokens))

    def _make(self, tokens: array[int], extra_keys: Sequence[ExtraKey], stop: int) -> BlockChain:
        """stop: prefixes that were forgotten count if they end in an earlier block."""
        keys, start = self.scopes.stamp(extra_keys) if extra_keys else (), 0
        while True:
            chain = BlockChain(self.root, self._block_size, self._hash_function, keys)
            self._memo.fill(chain, tokens)
            cut = self.scopes.cut(chain.hashes, start, stop)
            if cut is None:
                return chain
            keys, start = (*keys, self.scopes.prefix_stamp(chain.hashes[cut], cut)), cut + 1

    def forget_prefix(
        self,
        tokens: array[int],
        extra_keys: Sequence[ExtraKey],
        is_cached: Callable[[BlockHash], bool],
        oldest_alive: int | None,
    ) -> int:
        """Later chains avoid what begins with the full blocks of these tokens; returns how many tokens they hold.

        See Scopes.forget_prefix. Raises InvalidParameterError.
        """
        num_blocks = len(tokens) // self._block_size
        if not num_blocks:
            raise InvalidParameterError(
                f"the prefix has {len(tokens)} tokens and a block {self._block_size}: blocks are forgotten whole, so "
                "give a longer prefix, or forget its salt"
            )
        chain = self._make(tokens[: num_blocks * self._block_size], extra_keys, num_blocks - 1)
        self.scopes.forget_prefix(chain.hashes[-1], is_cached, oldest_alive)
        return num_blocks * self._block_size
