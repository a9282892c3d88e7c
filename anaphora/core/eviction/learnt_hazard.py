"""Learns how the chance of reuse depends on a block's age, uses and depth, and gives up the leaf that promises least.

    class of a run      (uses so far, depth), both in a few steps     a *cell* holds the leaves of one class and age;
    age of a run        time since its last use, see hazard_table     all of a cell are worth the same

Cells are ranked by the index of hazard_table. The victim is the oldest run of the lowest non-empty cell: the lowest bit
of one integer. Leaves of one class and tick (a cohort) move on to older cells together, at most NUM_AGES times. Time
counts the released blocks.

Where LRU finds more (see duel), its order rules for a while: the oldest run goes first, whatever its class.

What leaves, evicted or found, is remembered by its hash: who comes back has been used before, and that an evicted block
came back is learnt from. Memories are kept in two halves, so that the older half is forgotten at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from types import MappingProxyType

from anaphora.core.eviction.duel import Duel
from anaphora.core.eviction.hazard_table import AGE_STARTS, AGES, HORIZON, NUM_AGES, HazardTable
from anaphora.core.eviction.runs import Run, Runs
from anaphora.core.ids import BlockHash, BlockId
from anaphora.core.prefix_index import PrefixIndex

_TICKS_PER_POOL = 32  # releases of a whole pool
_MIN_TICK = 32  # blocks
_FITS_PER_POOL = 2
_MIN_FIT = 2048
_DECAY = 0.9
_USES = (0, 1, 2, 3, 3, 3, 4)  # uses -> step; more are as many as the last
_DEPTHS = (0, 2, 16)  # depth at which a step begins
_MOST_USES = len(_USES) - 1
_NUM_CLASSES = (_USES[-1] + 1) * len(_DEPTHS)
_BITS = tuple(1 << rank for rank in range(_NUM_CLASSES * NUM_AGES))
_IN_USE = -1

_Memory = tuple[int, int, int]
"""Uses, class, and tick of the last use; the tick is _IN_USE where the block was found and its life has ended."""


class _Cohort:
    """Leaves of one class that were released in one tick; they grow old together. cell: where they stand now."""

    __slots__ = ("cell", "runs")

    def __init__(self, cell: int) -> None:
        self.cell = cell
        self.runs: OrderedDict[Run, None] = OrderedDict()


_NOBODY: Mapping[int, _Cohort] = MappingProxyType({})


class LearntHazard:
    """O(1) a block and a run; ranking the cells anew costs O(cells) twice for each pool's worth of released blocks."""

    def __init__(self, index: PrefixIndex, ghosts_per_block: int = 8) -> None:
        """ghosts_per_block: contents remembered, at most, for each block of the pool."""
        size = len(index.hashes)
        self._hashes = index.hashes
        self._runs = Runs(index, self._add_leaf, self._remove_leaf)
        self._table = HazardTable(_NUM_CLASSES, _DECAY)
        self._duel = Duel()
        self._rules = True
        self._half = max(1, ghosts_per_block * size // 2)
        self._newer: dict[BlockHash, _Memory] = {}
        self._older: dict[BlockHash, _Memory] = {}

        self._clock = 0
        self._tick = 0
        self._tick_length = max(_MIN_TICK, size // _TICKS_PER_POOL)
        self._fit_length = max(_MIN_FIT, size // _FITS_PER_POOL)
        self._next_fit = self._fit_length

        self._by_birth: dict[int, dict[int, _Cohort]] = {}  # tick -> class -> leaves
        self._cells: list[OrderedDict[_Cohort, None]] = [OrderedDict() for _ in _BITS]
        self._bits = list(_BITS)
        self._by_rank: list[int] = []
        self._non_empty = 0  # bit r: the cell of rank r holds a leaf
        # Before anything is learnt: the oldest first, as LRU does.
        self._rank(sorted(range(len(_BITS)), key=lambda cell: -(cell % NUM_AGES)))

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._runs)

    # -- blocks come and go --------------------------------------------------------------------------------------------

    def put(self, blocks: Sequence[BlockId], depth: int) -> None:
        self._pass_time(len(blocks))
        chain = list(reversed(blocks))
        names: list[BlockHash] = [self._hashes[block] for block in chain]  # type: ignore[misc]
        uses, num_found = self._recall(names)
        self._duel.release(names, num_found, len(self) + len(chain))
        first = depth - len(chain) + 1
        starts = {start - first for start in _DEPTHS if 0 < start - first < len(chain)}
        starts.update(uses, self._runs.cuts(chain))
        bounds = [*sorted(starts), len(chain)]
        tick, runs = self._tick, []
        num_uses = step = 0
        for start, stop in pairwise(bounds):
            num_uses = uses.get(start, num_uses)
            while step + 1 < len(_DEPTHS) and _DEPTHS[step + 1] <= first + start:
                step += 1
            kind = _USES[num_uses] * len(_DEPTHS) + step
            self._table.begin(kind, tick, stop - start)
            runs.append(Run(chain[start:stop], kind, num_uses, tick))
        for run in reversed(runs):
            self._runs.add(run)

    def _recall(self, names: list[BlockHash]) -> tuple[dict[int, int], int]:
        """Place in the chain -> uses so far from there on; and how many were found in the pool.

        Evicted blocks among them have come back: learn it.
        """
        newer, older = self._newer.pop, self._older.pop
        memories = [newer(name, None) or older(name, None) for name in names]
        starts = [0, *(place for place in range(1, len(names)) if memories[place] is not memories[place - 1])]
        uses: dict[int, int] = {}
        last, num_found = -1, 0
        for start, stop in pairwise((*starts, len(names))):
            memory = memories[start]
            now = 0
            if memory is not None:
                now = min(memory[0] + 1, _MOST_USES)
                if memory[2] == _IN_USE:
                    num_found += stop - start
                else:
                    self._table.reuse(memory[1], memory[2], self._tick, stop - start)
            if now != last:
                uses[start] = last = now
        return uses, num_found

    def remove(self, blocks: Sequence[BlockId]) -> None:
        done = 0
        while done < len(blocks):
            run, count = self._runs.take_beginning(blocks[done:] if done else blocks)
            self._table.reuse(run.kind, run.tick, self._tick, count)
            self._remember(blocks[done : done + count], (run.uses, run.kind, _IN_USE))
            done += count

    def discard(self, block: BlockId) -> None:
        """The content lives on in another block, which comes next and recalls its past: it counts as found."""
        self.remove([block])

    def take(self, count: int) -> list[BlockId]:
        taken: list[BlockId] = []
        while len(taken) < count:
            run = self._victim() if self._rules else self._oldest()
            blocks = self._runs.take_tail(run, min(count - len(taken), len(run.blocks)))
            self._remember(blocks, (run.uses, run.kind, run.tick))
            taken += blocks
        return taken

    def _victim(self) -> Run:
        lowest = (self._non_empty & -self._non_empty).bit_length() - 1
        return next(iter(next(iter(self._cells[self._by_rank[lowest]])).runs))

    def _oldest(self) -> Run:
        """As LRU has it: of all classes, the first to come of those in cells of the highest age."""
        lowest = (self._non_empty & -self._non_empty).bit_length() - 1
        same_age = self._cells[self._by_rank[lowest] % NUM_AGES :: NUM_AGES]
        return min((next(iter(next(iter(cohorts)).runs)) for cohorts in same_age if cohorts), key=lambda run: run.tick)

    def pop_all(self) -> list[BlockId]:
        return self.take(len(self))

    def _remember(self, blocks: Sequence[BlockId], memory: _Memory) -> None:
        names: list[BlockHash] = [self._hashes[block] for block in blocks]  # type: ignore[misc]
        self._newer.update(zip(names, repeat(memory)))
        if len(self._newer) >= self._half:
            for (_, kind, tick), count in Counter(self._older.values()).items():
                if tick != _IN_USE:
                    self._table.lose(kind, tick, self._tick, count)
            self._older, self._newer = self._newer, {}

    # -- leaves --------------------------------------------------------------------------------------------------------

    def _add_leaf(self, run: Run) -> None:
        born = self._by_birth.setdefault(run.tick, {})
        cohort = born.get(run.kind)
        if cohort is None:
            ticks = self._tick - run.tick
            cohort = born[run.kind] = _Cohort(run.kind * NUM_AGES + AGES[ticks if ticks < HORIZON else HORIZON])
            self._enter_cell(cohort)
        cohort.runs[run] = None
        run.is_leaf = True

    def _remove_leaf(self, run: Run) -> None:
        born = self._by_birth[run.tick]
        cohort = born[run.kind]
        del cohort.runs[run]
        run.is_leaf = False
        if not cohort.runs:
            self._leave_cell(cohort)
            del born[run.kind]
            if not born:
                del self._by_birth[run.tick]

    def _enter_cell(self, cohort: _Cohort) -> None:
        self._cells[cohort.cell][cohort] = None
        self._non_empty |= self._bits[cohort.cell]

    def _leave_cell(self, cohort: _Cohort) -> None:
        cohorts = self._cells[cohort.cell]
        del cohorts[cohort]
        if not cohorts:
            self._non_empty ^= self._bits[cohort.cell]

    # -- time ----------------------------------------------------------------------------------------------------------

    def _pass_time(self, num_blocks: int) -> None:
        self._clock += num_blocks
        tick = self._clock // self._tick_length
        for now in range(self._tick + 1, tick + 1):
            for start in AGE_STARTS[1:]:
                for cohort in self._by_birth.get(now - start, _NOBODY).values():
                    self._leave_cell(cohort)
                    cohort.cell += 1
                    self._enter_cell(cohort)
        self._tick = tick
        if self._clock >= self._next_fit:
            self._next_fit = self._clock + self._fit_length
            indices = self._table.indices(tick)
            self._rules = self._duel.judge()
            if not self._rules:
                indices = [0.0] * len(indices)
            # The older of two equals first, as LRU does.
            self._rank(sorted(range(len(indices)), key=lambda cell: (indices[cell], -(cell % NUM_AGES), cell)))

    def _rank(self, cells: list[int]) -> None:
        """cells: all of them, those whose leaves go first in front."""
        for bit, cell in zip(_BITS, cells, strict=True):
            self._bits[cell] = bit
        self._by_rank = cells
        self._non_empty = sum(bit for bit, cohorts in zip(self._bits, self._cells, strict=True) if cohorts)
