"""How much of one request the pool can hold: arithmetic over the groups, whatever is free now.

Knows kinds and sizes; must not know requests, contents or what anybody holds.
"""

from __future__ import annotations

from collections.abc import Callable

from anaphora.core.ids import cdiv
from anaphora.core.side_groups import SideGroups
from anaphora.errors import ConfigError


class Capacity:
    """num_tokens: the most of one request that fit at once, computed token by token.

    num_blocks: of the pool. num_entries: of the spine; has_spine: whether these are blocks of the same pool.
    Raises ConfigError.
    """

    def __init__(self, num_blocks: int, num_entries: int, block_size: int, has_spine: bool, sides: SideGroups) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._has_spine = has_spine
        self._sides = sides
        self.num_tokens = num_entries * block_size
        if sides:
            if not self._fits(1, 1):
                raise ConfigError(
                    f"a pool of {num_blocks} blocks holds not one token, as each of the model's "
                    f"{len(sides) + has_spine} groups needs a block: raise num_blocks"
                )
            self.num_tokens = block_size * _most(num_entries, lambda count: self._fits(count * block_size, 1))

    def _fits(self, num_tokens: int, chunk: int) -> bool:
        num_spine = cdiv(num_tokens, self._block_size) if self._has_spine else 0
        return num_spine + sum(side.most_blocks(num_tokens, chunk) for side in self._sides) <= self._num_blocks

    def chunk(self, num_tokens: int, wanted: int) -> int:
        """The most tokens, at most `wanted`, that a request of num_tokens can compute in one step if it is alone."""
        if self._fits(num_tokens, wanted):
            return wanted
        return max(1, _most(wanted, lambda count: self._fits(num_tokens, count)))


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest count in [0, limit] for which `holds`, which is true up to it and false from there on."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
