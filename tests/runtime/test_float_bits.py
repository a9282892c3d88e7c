"""Claims: bits say exactly what floats do, for every float of 16 bits, and the first among equals is the largest."""

from __future__ import annotations

import pytest
import torch

from anaphora.runtime.float_bits import all_finite, largest

HALVES = [torch.bfloat16, torch.float16]
FLOATS = [*HALVES, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_finite_or_not_as_torch_says(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = numbers.isfinite()
    assert [all_finite(number) for number in numbers[~finite]] == [False] * int((~finite).sum())
    assert all_finite(numbers[finite])
    for number in numbers[finite][::97]:
        assert all_finite(number)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype)
    edges = torch.tensor([limit.max, limit.min, limit.smallest_normal, -limit.smallest_normal, 0.0, -0.0], dtype=dtype)
    rows = edges.repeat(3, 20)  # whose sum overflows
    assert all_finite(rows) and all_finite(rows[:0]) and all_finite(rows[:, :7])
    for worthless in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        for place in (0, 7, 119):
            broken = rows.clone()
            broken[1, place] = worthless
            assert not all_finite(broken)
            assert all_finite(broken[:, :place]) and all_finite(broken[2:])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_is_the_first_among_equals(dtype: torch.dtype) -> None:
    rows = torch.tensor(
        [
            [1.0, 3.0, -5.0, 3.0],
            [-4.0, -2.0, -2.0, -3.0],  # none above 0
            [-1.0, -0.0, 0.0, -0.0],
            [0.0, 0.0, -0.0, -7.0],
            [-9.0, 0.5, 0.25, 0.5],
        ],
        dtype=dtype,
    )
    expected = [1, 1, 1, 0, 1]
    assert largest(rows) == expected
    assert largest(rows[[0, 4]]) == [1, 1]
    assert [largest(row.unsqueeze(0))[0] for row in rows] == expected
    wider = torch.cat((rows, torch.full((5, 2), 100.0, dtype=dtype)), dim=1)[:, :4]  # a head padded beyond the words
    assert largest(wider) == expected
    drawn = torch.randn((64, 501), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert largest(drawn) == drawn.double().numpy().argmax(axis=-1).tolist()
