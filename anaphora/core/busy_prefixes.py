"""Which beginnings are found most: counted where hits end, by the hash of the last block found.

Requests that share a system prompt and nothing else end their hits at its last block; those that go on with a
conversation end deeper. So what stands on top are the beginnings that pay. Knows hashes and counts; never tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.core.ids import BlockHash

_KEPT = 512


@dataclass(frozen=True, slots=True)
class BusyPrefix:
    """A beginning of num_tokens, named by its last block's hash, at which the hits of num_requests ended."""

    block_hash: BlockHash
    num_tokens: int
    num_requests: int

    @property
    def num_hit_tokens(self) -> int:
        return self.num_tokens * self.num_requests


class BusyPrefixes:
    """At most 1,024 counts. Amortised O(1) a request; whoever is dropped for a lack of hits begins anew."""

    def __init__(self) -> None:
        self._counts: dict[BlockHash, list[int]] = {}  # hash -> [tokens, requests]

    def found(self, block_hash: BlockHash, num_tokens: int) -> None:
        """A request's hit of num_tokens ends with this block."""
        count = self._counts.setdefault(block_hash, [num_tokens, 0])
        count[1] += 1
        if len(self._counts) == 2 * _KEPT:
            latest_first = reversed(self._counts.items())  # among equals
            kept = sorted(latest_first, key=lambda item: item[1][0] * item[1][1], reverse=True)[:_KEPT]
            self._counts = dict(kept)

    def busiest(self, count: int) -> list[BusyPrefix]:
        """Those that saved the most tokens, most first."""
        prefixes = [BusyPrefix(block_hash, *counts) for block_hash, counts in self._counts.items()]
        prefixes.sort(key=lambda prefix: (-prefix.num_hit_tokens, prefix.block_hash))
        return prefixes[:count]
