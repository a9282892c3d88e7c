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

AGE_STARTS: tuple[int, ...] = tuple(AGES.index(age) for age in range(NUM_AGES))
"""The tick at which each age begins."""

_WIDTHS = tuple(stop - start for start, stop in zip(AGE_STARTS, (*AGE_STARTS[1:], 2 * AGE_STARTS[-1]), strict=True))


class HazardTable:
    """Counts of lives by class and age. O(1) a call; `indices`: O(classes * (ages + ticks of lives that go on))."""

    def __init__(self, num_classes: int, decay: float) -> None:
        """decay: what a count is worth after each `indices`, so that old traffic is forgotten; in (0, 1]."""
        self._decay = decay
        self._reused = [[0.0] * NUM_AGES for _ in range(num_classes)]
        self._lost = [[0.0] * NUM_AGES for _ in range(num_classes)]
        self._alive: list[dict[int, int]] = [{} for _ in range(num_classes)]  # by tick of birth

    def begin(self, kind: int, born: int, count: int) -> None:
        """`count` lives of a class begin."""
        alive = self._alive[kind]
        alive[born] = alive.get(born, 0) + count

    def reuse(self, kind: int, born: int, now: int, count: int) -> None:
        self._end(self._reused, kind, born, now, count)

    def lose(self, kind: int, born: int, now: int, count: int) -> None:
        self._end(self._lost, kind, born, now, count)

    def _end(self, table: list[list[float]], kind: int, born: int, now: int, count: int) -> None:
        alive = self._alive[kind]
        left = alive[born] - count
        if left:
            alive[born] = left
        else:
            del alive[born]
        table[kind][AGES[min(now - born, HORIZON)]] += count

    def indices(self, now: int) -> list[float]:
        """The index of each class and age, at class * NUM_AGES + age, in reuses a tick. Then lets counts decay."""
        going_on, ages = [], AGES
        for alive in self._alive:
            row = [0.0] * NUM_AGES
            for born, count in alive.items():
                ticks = now - born
                row[ages[ticks if ticks < HORIZON else HORIZON]] += count
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
    """From the oldest age back: what waiting through an age earns, and on through the stretches after it while those
    earn no less. A stretch is (reuses, time, what is left) of one life at its beginning; its index is reuses / time.
    """
    indices = [0.0] * NUM_AGES
    stretches: list[tuple[float, float, float]] = []  # the next one is on top
    for age in range(NUM_AGES - 1, -1, -1):
        gain = hazards[age]
        time = _WIDTHS[age] * (1 - gain / 2)
        left = 1 - gain
        while stretches:
            next_gain, next_time, next_left = stretches[-1]
            if next_gain * time < gain * next_time:
                break
            stretches.pop()
            gain += left * next_gain
            time += left * next_time
            left *= next_left
        stretches.append((gain, time, left))
        indices[age] = gain / time
    return indices
