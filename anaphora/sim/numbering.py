"""From tokens to a trace's ids: one number for each beginning, given out in the order in which they are first seen.

Knows tokens and the engine's own block chain; must not know where the tokens come from.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from anaphora.core.hashing import BlockChain, ExtraKey, encode_tokens


class BlockNumbering:
    """The ids of one trace. block_size: tokens behind one id."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[bytes, int] = {}

    def ids(
        self, tokens: array[int], input_length: int, *, extra_keys: Iterable[ExtraKey] = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(hash_ids, output_hash_ids), as in TraceRequest, of a prompt and what is known of its output behind it."""
        chain = BlockChain(b"", self.block_size, extra_keys=extra_keys)
        chain.extend(tokens)
        num_full, tail = divmod(input_length, self.block_size)
        names: list[bytes] = list(chain.hashes[:num_full])
        if tail:
            parent = names[-1] if names else b"".join(chain.extra_keys.values())
            rest = encode_tokens(tokens[input_length - tail : input_length])
            names.append(hashlib.sha256(b"tail" + parent + rest).digest())
        return self._numbered(names), self._numbered(chain.hashes[num_full:])

    def _numbered(self, names: Iterable[bytes]) -> tuple[int, ...]:
        numbers = self._numbers
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)
