"""Claims: products with codes are those of formulas in float64, and nothing but the asked outputs is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from test_kernels import WAYS, load_tiles

from anaphora.runtime.int8 import quantize_rows
from anaphora.runtime.kernels.int8 import linear_codes, panel_bytes, prepare_codes


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 17, 40])
@pytest.mark.parametrize(("count", "outputs"), [(64, 64), (96, 83), (576, 55)])
def test_linear_parts_of_codes(dtype: torch.dtype, use_tiles: bool, num_rows: int, count: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    padded = -(-num_rows // 16) * 16
    x = torch.randn(padded, count, generator=generator).to(dtype)
    x[num_rows:] = torch.nan
    codes, scales = quantize_rows(torch.randn(outputs, count, generator=generator).to(dtype))
    operands, out = np.zeros(padded * count * 4, np.uint8), np.full((padded, outputs), 7, np.float32)
    element, scratch, panel = (0,) * dtype.itemsize, np.zeros(1024, np.uint8), np.zeros(panel_bytes(count), np.uint8)
    if use_tiles:
        load_tiles()
    prepare_codes(x.data_ptr(), count * dtype.itemsize, num_rows, count, operands.ctypes.data, use_tiles, element)
    for begin, end in ((0, 32), (32, outputs)):
        linear_codes(
            operands.ctypes.data, num_rows, codes.data_ptr(), scales.data_ptr(), count, begin, end, out.ctypes.data,
            4 * outputs, scratch.ctypes.data, panel.ctypes.data, use_tiles, element,
        )  # fmt: skip
        assert (out[:num_rows, end:] == 7).all()
    expected = x[:num_rows].double() @ (codes.double() * scales.double().unsqueeze(1)).T
    assert (torch.from_numpy(out)[:num_rows] - expected).abs().max() < 1e-4
