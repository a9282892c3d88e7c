"""Seeds for requests that bring none. Knows the engine's seed and a counter; the same calls give the same seeds."""

from __future__ import annotations

from hashlib import blake2b


class DrawnSeeds:
    """The n-th seed depends on the engine's seed and on n."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_drawn = 0

    def look(self) -> int:
        """63 bits: the seed that `draw` would take."""
        digest = blake2b(f"{self._seed}:{self._num_drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> 1

    def draw(self) -> None:
        """It is taken. A refused request takes none, so that it does not change what the next one gets."""
        self._num_drawn += 1
