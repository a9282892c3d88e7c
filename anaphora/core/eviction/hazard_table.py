"""How likely a block is to be used again at each age, learnt from the lives of blocks, and what waiting is worth.

A *life* begins when a block is released. It ends in a reuse, or is lost from sight (forgotten as a ghost), or goes on.
Time is counted in ticks; an age is a span of ticks, two spans to each doubling:

    ticks  0   1   2   3   4   6   8   12   16 ...          hazard(age) = reuses at this age / lives that reached it
    age    [ 0)[ 1)[ 2)[ 3)[ 4)[ 5)[ 6)[ 7 )[ ...           (a life that ends at an age counts as half of one there)

The *index* of a class at an age is Gittins': the most, over all times t to wait from now on, of

    P(reused within t) / E[time until reused, or t]

the reuses that a block earns for the room that it takes, given up at the best moment. Knows classes as numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

NUM_AGES = 23
HORIZON = 2048
"""Ticks after which a block only grows older in name."""

_PRIOR_LIVES = 20.0
_MAX_HAZARD = 0.95


def _age(ticks: int) -> int:
    if ticks < 2:
        return ticks
    bits = ticks.bit_length()
    return min(NUM_AGES - 1, 2 * bits - 2 + (ticks >> (bits - 2) & 1))


AGES: tuple[int, ...] = tuple(map(_age, range(HORIZON + 1)))
"""Age by ticks, up to HORIZON."""

_STARTS = tuple(AGES.index(age) for age in range(NUM_AGES))
_WIDTHS = tuple(stop - start for start, stop in zip(_STARTS, (*_STARTS[1:], 2 * _STARTS[-1]), strict=True))


class HazardTable:
    """Counts of lives by class and age. O(1) a life; `indices` costs O(classes * ages**2) at worst."""

    def __init__(self, num_classes: int, decay: float) -> None:
        """decay: what a count is worth after each `indices`, so that old traffic is forgotten; in (0, 1]."""
        self._decay = decay
        self._reused = [[0.0] * NUM_AGES for _ in range(num_classes)]
        self._lost = [[0.0] * NUM_AGES for _ in range(num_classes)]
        self._alive: list[dict[int, int]] = [{} for _ in range(num_classes)]  # by tick of birth

    def begin(self, kind: int, born: int) -> None:
        alive = self._alive[kind]
        alive[born] = alive.get(born, 0) + 1

    def reuse(self, kind: int, born: int, now: int) -> None:
        self._end(self._reused, kind, born, now)

    def lose(self, kind: int, born: int, now: int) -> None:
        self._end(self._lost, kind, born, now)

    def _end(self, table: list[list[float]], kind: int, born: int, now: int) -> None:
        alive = self._alive[kind]
        left = alive[born] - 1
        if left:
            alive[born] = left
        else:
            del alive[born]
        table[kind][AGES[min(now - born, HORIZON)]] += 1

    def indices(self, now: int) -> list[float]:
        """The index of each class and age, at class * NUM_AGES + age, in reuses a tick. Then lets counts decay."""
        going_on = []
        for alive in self._alive:
            row = [0.0] * NUM_AGES
            for born, count in alive.items():
                row[AGES[min(now - born, HORIZON)]] += count
            going_on.append(row)
        pooled = _hazards(_sum(self._reused), _sum(self._lost), _sum(going_on), [0.0] * NUM_AGES)
        indices: list[float] = []
        for reused, lost, alive_now in zip(self._reused, self._lost, going_on, strict=True):
            indices += _gittins(_hazards(reused, lost, alive_now, pooled))
        for row in (*self._reused, *self._lost):
            row[:] = [count * self._decay for count in row]
        return indices


def _sum(rows: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _hazards(
    reused: Sequence[float], lost: Sequence[float], going_on: Sequence[float], prior: Sequence[float]
) -> list[float]:
    """Reuses over lives at risk at each age, drawn towards the prior where lives are few."""
    hazards = [0.0] * NUM_AGES
    older = 0.0
    for age in range(NUM_AGES - 1, -1, -1):
        here = reused[age] + lost[age] + going_on[age]
        at_risk = older + here / 2 + _PRIOR_LIVES
        hazards[age] = min(_MAX_HAZARD, (reused[age] + _PRIOR_LIVES * prior[age]) / at_risk)
        older += here
    return hazards


def _gittins(hazards: Sequence[float]) -> list[float]:
    """The sum of what later ages add is no better than the best of them: stop where that cannot raise the ratio."""
    rates = [hazard / (width * (1 - hazard / 2)) for hazard, width in zip(hazards, _WIDTHS, strict=True)]
    best_later = [*list(accumulate(reversed(rates), max))[::-1][1:], 0.0]
    indices = []
    for age in range(NUM_AGES):
        best = gain = time = 0.0
        left = 1.0
        for later in range(age, NUM_AGES):
            reused = left * hazards[later]
            time += _WIDTHS[later] * (left - reused / 2)
            gain += reused
            left -= reused
            if gain > best * time:
                best = gain / time
            if best_later[later] <= best:
                break
        indices.append(best)
    return indices
