"""Learns how the chance of reuse depends on a block's age, uses and depth, and gives up the leaf that promises least.

    class of a block    (uses so far, depth), both in a few steps     a *cell* holds the leaves of one class and age;
    age of a block      time since its last use, see hazard_table     all of a cell are worth the same

Cells are ranked by the index of hazard_table. A victim is the oldest leaf of the lowest non-empty cell: the lowest bit
of one integer. Leaves move on to older cells as time passes, at most NUM_AGES times. Time counts the released blocks.

Evicted blocks stay in sight as *ghosts*, `ghosts_per_block` times the pool's size: who comes back has been used before,
and that it came back is learnt from. Every `watch_every`-th life is learnt from; that bounds the cost, not the quality.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from anaphora.core.eviction.hazard_table import AGES, HORIZON, NUM_AGES, HazardTable
from anaphora.core.eviction.leaves import LeafPolicy
from anaphora.core.ids import BlockHash, BlockId
from anaphora.core.prefix_index import PrefixIndex

_TICKS_PER_POOL = 32  # releases of a whole pool
_MIN_TICK = 32  # blocks
_FITS_PER_POOL = 2
_MIN_FIT = 1024
_DECAY = 0.9
_USES = (0, 1, 2, 3, 3, 3, 4)  # uses -> step; more are as many as the last
_DEPTHS = (0, 0, *[1] * 14, 2)  # depth -> step
_MOST_USES, _DEEPEST = len(_USES) - 1, len(_DEPTHS) - 1
_NUM_DEPTHS = _DEPTHS[-1] + 1
_NUM_CLASSES = (_USES[-1] + 1) * _NUM_DEPTHS
_UNWATCHED = -1

_Ghost = tuple[int, int, int]
"""Uses, class, tick of the last use; the tick is _UNWATCHED where nothing is learnt from this life."""


class LearntHazard(LeafPolicy):
    """O(1) a block; ranking the cells anew costs O(cells) twice for each pool's worth of released blocks."""

    def __init__(self, index: PrefixIndex, ghosts_per_block: int = 8, watch_every: int = 3) -> None:
        super().__init__(index)
        size = len(index.hashes)
        self._max_ghosts = ghosts_per_block * size
        self._watch_every = watch_every
        self._table = HazardTable(_NUM_CLASSES, _DECAY)
        self._ghosts: OrderedDict[BlockHash, _Ghost] = OrderedDict()

        self._clock = 0
        self._tick = 0
        self._tick_length = max(_MIN_TICK, size // _TICKS_PER_POOL)
        self._fit_length = max(_MIN_FIT, size // _FITS_PER_POOL)
        self._next_fit = self._fit_length

        self._uses = [0] * size
        self._classes = [0] * size
        self._ticks = [0] * size
        self._watched = [False] * size
        self._until_watched = 0

        num_cells = _NUM_CLASSES * NUM_AGES
        self._cells: list[OrderedDict[BlockId, None]] = [OrderedDict() for _ in range(num_cells)]
        self._cell_of = [0] * size
        self._bits = [0] * num_cells
        self._by_rank: list[int] = []
        self._non_empty = 0  # bit r: the cell of rank r holds a leaf
        # Before anything is learnt: the oldest first, as LRU does.
        self._rank(sorted(range(num_cells), key=lambda cell: -(cell % NUM_AGES)))

    # -- blocks come and go --------------------------------------------------------------------------------------------

    def _before_put(self, blocks: Sequence[BlockId], depth: int) -> None:
        self._pass_time(len(blocks))
        tick, table, hashes = self._tick, self._table, self._index.hashes
        lineages, seen, ghosts = self._lineages, self._seen, self._ghosts
        all_uses, classes, ticks, watched = self._uses, self._classes, self._ticks, self._watched
        until_watched = self._until_watched
        for block in blocks:
            if seen[block] == lineages[block]:
                uses = all_uses[block] + 1
            else:
                seen[block] = lineages[block]
                uses = 0
                ghost = ghosts.pop(hashes[block], None)  # type: ignore[arg-type]
                if ghost is not None:
                    uses = ghost[0] + 1
                    if ghost[2] != _UNWATCHED:
                        table.reuse(ghost[1], ghost[2], tick)
            all_uses[block] = uses
            kind = _USES[uses if uses < _MOST_USES else _MOST_USES] * _NUM_DEPTHS
            kind += _DEPTHS[depth if 0 <= depth < _DEEPEST else _DEEPEST]
            depth -= 1
            classes[block] = kind
            ticks[block] = tick
            if until_watched:
                until_watched -= 1
                watched[block] = False
            else:
                until_watched = self._watch_every - 1
                watched[block] = True
                table.begin(kind, tick)
        self._until_watched = until_watched

    def _before_remove(self, blocks: Sequence[BlockId]) -> None:
        watched, classes, ticks, now = self._watched, self._classes, self._ticks, self._tick
        for block in blocks:
            if watched[block]:
                self._table.reuse(classes[block], ticks[block], now)

    def discard(self, block: BlockId) -> None:
        """The content lives on in another block, which comes next and finds its past among the ghosts."""
        born = self._ticks[block] if self._watched[block] else _UNWATCHED
        self._ghosts[self._index.hashes[block]] = self._uses[block], self._classes[block], born  # type: ignore[index]
        super().discard(block)

    # -- leaves --------------------------------------------------------------------------------------------------------

    def _add_leaf(self, block: BlockId) -> None:
        ticks = self._tick - self._ticks[block]
        cell = self._classes[block] * NUM_AGES + AGES[ticks if ticks < HORIZON else HORIZON]
        self._cell_of[block] = cell
        self._cells[cell][block] = None
        self._non_empty |= self._bits[cell]

    def _remove_leaf(self, block: BlockId) -> None:
        cell = self._cell_of[block]
        leaves = self._cells[cell]
        del leaves[block]
        if not leaves:
            self._non_empty ^= self._bits[cell]

    def _evict_leaf(self) -> BlockId:
        non_empty = self._non_empty
        cell = self._by_rank[(non_empty & -non_empty).bit_length() - 1]
        leaves = self._cells[cell]
        block, _ = leaves.popitem(last=False)
        if not leaves:
            self._non_empty = non_empty ^ self._bits[cell]
        ghosts = self._ghosts
        born = self._ticks[block] if self._watched[block] else _UNWATCHED
        ghosts[self._index.hashes[block]] = self._uses[block], self._classes[block], born  # type: ignore[index]
        if len(ghosts) > self._max_ghosts:
            _, (_, kind, born) = ghosts.popitem(last=False)
            if born != _UNWATCHED:
                self._table.lose(kind, born, self._tick)
        return block

    # -- time ----------------------------------------------------------------------------------------------------------

    def _pass_time(self, num_blocks: int) -> None:
        self._clock += num_blocks
        tick = self._clock // self._tick_length
        if tick != self._tick:
            self._tick = tick
            self._move_on()
        if self._clock >= self._next_fit:
            self._next_fit = self._clock + self._fit_length
            indices = self._table.indices(tick)
            # The older of two equals first, as LRU does.
            self._rank(sorted(range(len(indices)), key=lambda cell: (indices[cell], -(cell % NUM_AGES), cell)))

    def _move_on(self) -> None:
        """Leaves that have outgrown their cell's age go to an older one: first in, first out, as they came by age.

        A leaf may come in behind a younger one, when its last child goes; then it waits for that one to move.
        """
        cells, cell_of, now, all_ticks = self._cells, self._cell_of, self._tick, self._ticks
        for cell in self._non_empty_cells():
            leaves, age = cells[cell], cell % NUM_AGES
            while leaves:
                block = next(iter(leaves))
                new_age = AGES[min(now - all_ticks[block], HORIZON)]
                if new_age == age:
                    break
                del leaves[block]
                older = cell_of[block] = cell - age + new_age
                cells[older][block] = None
                self._non_empty |= self._bits[older]
            if not leaves:
                self._non_empty ^= self._bits[cell]

    def _non_empty_cells(self) -> list[int]:
        rest, found = self._non_empty, []
        while rest:
            lowest = rest & -rest
            found.append(self._by_rank[lowest.bit_length() - 1])
            rest ^= lowest
        return found

    def _rank(self, cells: list[int]) -> None:
        """cells: all of them, those whose leaves go first in front."""
        self._by_rank = cells
        self._non_empty = 0
        for rank, cell in enumerate(cells):
            self._bits[cell] = 1 << rank
            if self._cells[cell]:
                self._non_empty |= 1 << rank
