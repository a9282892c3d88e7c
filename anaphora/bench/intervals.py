"""Percentiles, and what a small sample says about a median. No distribution is assumed.

The interval of a median comes from order statistics: of n independent values, the median of what they were drawn from
lies between the k-th smallest and the k-th largest, unless fewer than k of them fell on one side of it: a fair coin's
binomial probability (H. A. David, Order Statistics, ch. 7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WANTED_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of the values, and the narrowest [low, high] that holds the true one at WANTED_CONFIDENCE.

    confidence: the coverage in fact; below the wanted one where the values are too few (fewer than 6), and then
    [low, high] is all of them.
    """

    median: float
    low: float
    high: float
    confidence: float
    num_values: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the middle two."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def percentile(values: Sequence[float], share: int) -> float:
    """Nearest rank: the smallest value that at least `share` percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def has_percentile(num_values: int, share: int) -> bool:
    """Whether so many values can tell this percentile from their largest one."""
    return num_values * (100 - share) >= 100


def median_interval(values: Sequence[float]) -> Interval:
    """values: independent ones, at least one."""
    ordered = sorted(values)
    count = len(ordered)
    rank, confidence = 1, _coverage(count, 1)
    while 2 * (rank + 1) <= count and (wider := _coverage(count, rank + 1)) >= WANTED_CONFIDENCE:
        rank, confidence = rank + 1, wider
    return Interval(median(ordered), ordered[rank - 1], ordered[-rank], confidence, count)


def _coverage(count: int, rank: int) -> float:
    """Probability that the median lies between the rank-th smallest and the rank-th largest of `count` values."""
    missed = 2 * sum(math.comb(count, below) for below in range(rank)) / float(1 << count)
    return max(0.0, 1.0 - missed)
