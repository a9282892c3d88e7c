"""What a small sample says about a median: exact coverages, by hand."""

from __future__ import annotations

import pytest

from anaphora.bench.intervals import has_percentile, median, median_interval, percentile


def test_a_percentile_is_the_value_at_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (50, 95, 99)] == [50.0, 95.0, 99.0]
    assert percentile([3.0, 1.0, 2.0], 95) == 3.0
    assert percentile([7.0], 1) == 7.0


def test_p95_needs_20_values_and_p99_needs_100() -> None:
    assert [has_percentile(19, 95), has_percentile(20, 95)] == [False, True]
    assert [has_percentile(99, 99), has_percentile(100, 99)] == [False, True]


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5
    assert median([9.0, 1.0, 5.0]) == 5.0


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [
        (1, 1, 1, 0.0),
        (2, 1, 2, 0.5),
        (5, 1, 5, 0.9375),  # 1 - 2 / 2**5
        (6, 1, 6, 0.96875),  # the fewest that reach 95 %
        (8, 1, 8, 1 - 2 / 2**8),  # rank 2 would cover 0.93 only
        (9, 2, 8, 1 - 2 * 10 / 2**9),
        (12, 3, 10, 1 - 2 * 79 / 2**12),
    ],
)
def test_the_interval_is_the_narrowest_that_covers_95_percent(
    count: int, low: int, high: int, confidence: float
) -> None:
    interval = median_interval([float(value) for value in range(count, 0, -1)])
    assert (interval.low, interval.high) == (low, high)
    assert interval.confidence == pytest.approx(confidence, abs=1e-12)
    assert interval.num_values == count
