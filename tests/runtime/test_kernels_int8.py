"""Claims: products with codes are those of formulas in float64, and nothing but the asked outputs is written."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from test_kernels import WAYS, bfloat16_llama, load_tiles, plans, run_steps

from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.fast_forward import FastForward, make_forward
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.int8 import dequantize_rows, quantize_rows
from anaphora.runtime.kernels.int8 import linear_codes, panel_bytes, prepare_codes, unpack_matrices
from anaphora.runtime.quantization import quantize_int8


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_codes_are_those_of_torch_whoever_unpacks_them(dtype: torch.dtype) -> None:
    codes, scales = quantize_rows(torch.randn(37, 96, generator=torch.Generator().manual_seed(1)).to(dtype))
    out = torch.full((38, 96), torch.nan, dtype=dtype)
    matrices = np.array([[codes.data_ptr(), scales.data_ptr(), 37, 96, out.data_ptr()]], np.int64)
    for thread in (2, 0, 1):
        unpack_matrices(thread, 3, matrices, (0,) * dtype.itemsize)
    assert torch.equal(out[:37], dequantize_rows(codes, scales))
    assert bool(out[37].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_steps_are_as_near_to_float32_as_those_of_the_modules_own_layers(tied: bool, dtype: torch.dtype) -> None:
    module = bfloat16_llama().to(dtype)
    if tied:
        module.lm_head.weight = module.model.embed_tokens.weight
    quantize_int8(module)
    forward = make_forward(module, inspect_model(module, 512), fast=True)
    assert isinstance(forward, FastForward)
    assert forward._kernels
    fast, library = run_steps(module, forward, plans()), run_steps(module, PagedForward(module), plans())
    truth = run_steps(module, PagedForward(module.float()), plans())
    for right, ours, theirs in zip(truth, fast, library, strict=True):
        for a, b, c in zip(right, ours, theirs, strict=True):
            limit = 1e-4 * float(a.norm()) if dtype == torch.float32 else 1.25 * float((c - a).norm())
            assert float((b - a).norm()) < limit


def test_layers_of_two_kinds_decode_without_kernels_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    module = bfloat16_llama()
    plain = bfloat16_llama().model.layers[1].mlp.up_proj
    quantize_int8(module)
    module.model.layers[1].mlp.up_proj = plain
    with caplog.at_level(logging.INFO, "anaphora.runtime"):
        forward = make_forward(module, inspect_model(module, 512), fast=True)
    assert isinstance(forward, FastForward) and forward._kernels == ()
    assert "some of its layers are int8 and some are not" in caplog.text


def test_the_same_bits_whatever_the_number_of_threads() -> None:
    module = bfloat16_llama().to(torch.bfloat16)
    quantize_int8(module)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(run_steps(module, make_forward(module, inspect_model(module, 512), fast=True), plans()[1:]))
    torch.set_num_threads(1)
    for result in results[1:]:
        assert all(
            torch.equal(a, b)
            for step, first in zip(result, results[0], strict=True)
            for a, b in zip(step, first, strict=True)
        )
