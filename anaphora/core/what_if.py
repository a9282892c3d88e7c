"""What the hit rate would be with another pool: the miss-ratio curve of LRU at a few sizes, at once.

One list of block hashes in order of last use serves every pool size (Mattson et al., 1970): a pool of N blocks holds
the first N - 1 of it, as the partly filled block of the running request takes one. A request uses its tail first and
its head last, as it is released, so a parent always stands before its child, and what a pool holds of a prompt is a
leading run of it. So the list is kept by *uses* (one call of `use`), each with the blocks that were last used by it:

    newest use                                                                        oldest use
    [ ############ )[ ##### )[ # )[ ######## )[ ################ )[ #### )[ ######### )    dropped
                       ^ 0.5x of the pool ends here    ^ 1x                       ^ 2x

    what later uses took away of a use is a beginning of it; what is left is its tail
    an *edge* is the use in which a pool size ends, and how many blocks stand before that use

That costs a few dict passes at C speed for the blocks of a request, and a step of Python for each earlier use that it
shares blocks with. Large pools: only blocks whose hash lies under a threshold are listed (SHARDS: Waldspurger et al.,
FAST 2015), so memory is bounded. *Misses* are scaled up, not hits: a beginning that everybody uses misses once, so it
hardly matters whether it was drawn.

Knows block hashes and counts; must not know blocks of the pool, policies or time. Blocks in use count as just used.
Two contents with one hash are one block here: a count may be off by them, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from anaphora.core.ids import BlockHash
from anaphora.errors import ConfigError

SCALES = (0.5, 1.0, 2.0, 4.0)
"""Pool sizes on the curve, as multiples of the real one."""

MAX_LISTED_BLOCKS = 131_072
"""What bounds memory: about 24 MiB."""

_HASH_RANGE = 1 << 64
_NEVER = -1


@dataclass(frozen=True, slots=True)
class WhatIfPoint:
    """One pool size on the curve: what an LRU pool of num_blocks would have found of num_queried_tokens.

    scale: num_blocks / blocks of the real pool. num_queried_tokens only rises; the difference of two snapshots
    describes an interval.
    """

    scale: float
    num_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int

    @property
    def hit_rate(self) -> float:
        """In [0, 1]; 0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


@dataclass(slots=True)
class _Edge:
    """Where a pool of `size` listed blocks ends: in use number `use`, with `before` blocks in newer uses.

    hits: listed blocks that such a pool would have found.
    """

    size: int
    use: int = 0
    before: int = 0
    hits: int = 0


class WhatIf:
    """The curve of one engine.

    scales: pool sizes as multiples of num_blocks, ascending. share: of the blocks that are listed, in (0, 1]; None
    lists all of a small pool, and MAX_LISTED_BLOCKS in all for the largest scale. Raises ConfigError.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, scales: Sequence[float] = SCALES, share: float | None = None
    ) -> None:
        if not scales or list(scales) != sorted(set(scales)) or scales[0] <= 0:
            raise ConfigError(f"scales must be positive and ascending, got {tuple(scales)}")
        if share is None:
            share = min(1.0, MAX_LISTED_BLOCKS / (scales[-1] * num_blocks))
        if not 0 < share <= 1:
            raise ConfigError(f"share must be in (0, 1], got {share}")
        limit = max(1, round(share * _HASH_RANGE))
        self.share = limit / _HASH_RANGE
        self._threshold = limit.to_bytes(8) if limit < _HASH_RANGE else None  # None: every block is listed
        self._block_size = block_size
        self._scales = tuple(scales)
        self._sizes = [max(1, round(scale * num_blocks)) for scale in scales]
        self._edges = [_Edge(max(1, round(self.share * (size - 1)))) for size in self._sizes]
        self._last_use: dict[BlockHash, int] = {}
        self._blocks: dict[int, list[BlockHash]] = {}  # by use, head first; those that are its own still are the tail
        self._counts: dict[int, int] = {}  # how many are
        self._num_uses = 0
        self._num_queried_tokens = 0
        self._num_queried_blocks = 0
        self._num_queried_listed = 0

    def query(self, hashes: Sequence[BlockHash], num_tokens: int, max_hit_blocks: int) -> None:
        """A prompt of num_tokens with these full blocks is admitted, and uses them from now on.

        At most the first max_hit_blocks can be found.
        """
        used = self._listed(hashes)
        num_wanted = len(used) - len(self._listed(hashes[max_hit_blocks:]))
        by_use = self._by_use(used)
        self._num_queried_tokens += num_tokens
        self._num_queried_blocks += min(max_hit_blocks, len(hashes))
        self._num_queried_listed += num_wanted
        for edge in self._edges:
            hits = 0
            for use, count in by_use:
                if use > edge.use:
                    hits += count
                else:
                    if use == edge.use:
                        hits += min(count, max(0, edge.size - edge.before))
                    break
            edge.hits += min(hits, num_wanted)
        self._move(used, by_use)

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """These leading blocks of a chain are in use now, or were until now."""
        used = self._listed(hashes)
        self._move(used, self._by_use(used))

    def _move(self, used: list[BlockHash], by_use: list[tuple[int, int]]) -> None:
        """Listed blocks of one chain go to the front."""
        if not used:
            return
        self._num_uses += 1
        now, counts, blocks, edges = self._num_uses, self._counts, self._blocks, self._edges
        for use, count in by_use:
            for edge in edges:
                if use <= edge.use:
                    edge.before += count
            if use not in counts:  # listed for the first time
                continue
            left = counts[use] = counts[use] - count
            if left <= 0:
                del counts[use], blocks[use]
            elif 2 * left < len(blocks[use]):
                del blocks[use][:-left]
        self._last_use.update(dict.fromkeys(used, now))
        blocks[now] = used
        counts[now] = len(used)
        for edge in edges:
            while edge.before >= edge.size:
                edge.use += 1
                edge.before -= counts.get(edge.use, 0)
        self._drop()

    def clear(self) -> None:
        """Everything cached is forgotten; the counts stay."""
        self._last_use.clear()
        self._blocks.clear()
        self._counts.clear()
        for edge in self._edges:
            edge.use, edge.before = self._num_uses, 0

    def curve(self) -> tuple[WhatIfPoint, ...]:
        """One point for each scale. Costs nothing worth counting."""
        points = []
        for scale, size, edge in zip(self._scales, self._sizes, self._edges, strict=True):
            missed = (self._num_queried_listed - edge.hits) / self.share
            hit_tokens = self._block_size * max(0, round(self._num_queried_blocks - missed))
            points.append(WhatIfPoint(scale, size, self._num_queried_tokens, hit_tokens))
        return tuple(points)

    def _listed(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        return list(hashes) if self._threshold is None else list(filter(self._threshold.__gt__, hashes))

    def _by_use(self, hashes: Iterable[BlockHash]) -> list[tuple[int, int]]:
        """(use, how many of these blocks it was the last one of), newest first, as parents are used after children."""
        return list(Counter(map(self._last_use.get, hashes, repeat(_NEVER))).items())

    def _drop(self) -> None:
        """Forget the uses behind the last edge: the oldest ones, as a dict keeps the order of its keys."""
        last_use, counts, blocks = self._last_use, self._counts, self._blocks
        oldest, end = next(iter(counts)), self._edges[-1].use
        while oldest < end:
            for block_hash in blocks.pop(oldest)[-counts.pop(oldest) :]:
                if last_use.get(block_hash) == oldest:
                    del last_use[block_hash]
            oldest = next(iter(counts))
