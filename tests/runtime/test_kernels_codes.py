"""Claims: products with codes are those of formulas in float64, and nothing but the asked outputs is written."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from test_kernels import HAS_TILES, WAYS, bfloat16_llama, load_tiles, plans, run_steps

from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.codes import dequantize, quantize
from anaphora.runtime.fast_forward import FastForward, make_forward
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.kernels.byte_products import SIDE_BYTES, has_byte_products, quantize_row
from anaphora.runtime.kernels.code_layout import panel_bytes
from anaphora.runtime.kernels.codes import MAX_VECTOR_ROWS, prepare_rows, product
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.unpacking import PAD_BYTES, row_stride, rows_of
from anaphora.runtime.quantization import quantize_weights

HALVES = {8: (0, 0), 4: (0,)}


@kernel
def asked_for_bytes():  # type: ignore[no-untyped-def]
    return has_byte_products()


@kernel
def make_operand(source, out, count, element):  # type: ignore[no-untyped-def]
    quantize_row(source, out, count, element)


HAS_BYTES = bool(asked_for_bytes())


def weight_of(outputs: int, count: int, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(outputs, count, generator=torch.Generator().manual_seed(outputs)) * 0.1
    return quantize(weight.to(dtype), bits)


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("count", "outputs"), [(32, 16), (96, 80), (576, 48)])
def test_linear_parts_of_codes(
    dtype: torch.dtype, use_tiles: bool, num_rows: int, bits: int, count: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    padded = -(-num_rows // 16) * 16
    x = torch.randn(padded, count, generator=generator).to(dtype)
    x[num_rows:] = torch.nan
    codes, scales = weight_of(outputs, count, bits, dtype)
    operands, out = np.zeros(padded * count * 4, np.uint8), np.full((padded, outputs), 7, np.float32)
    element, scratch, panel = (0,) * dtype.itemsize, np.zeros(1024, np.uint8), np.zeros(panel_bytes(count), np.uint8)
    if use_tiles:
        load_tiles()
    halves = HALVES[bits]
    prepare_rows(
        x.data_ptr(), count * dtype.itemsize, num_rows, count, operands.ctypes.data, use_tiles, element, halves
    )
    for begin, end in ((0, 16), (16, outputs)):
        product(
            operands.ctypes.data, num_rows, codes.data_ptr(), scales.data_ptr(), count, begin, end, out.ctypes.data,
            4 * outputs, scratch.ctypes.data, panel.ctypes.data, use_tiles, element, halves,
        )  # fmt: skip
        assert (out[:num_rows, end:] == 7).all()
    by_tiles = use_tiles and num_rows > MAX_VECTOR_ROWS
    weight = dequantize(codes, scales, torch.bfloat16 if by_tiles else torch.float32).double()
    expected = x[:num_rows].double() @ weight.T
    assert (torch.from_numpy(out)[:num_rows] - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.skipif(not HAS_BYTES, reason="no products of bytes")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_gets_the_same_bits_in_any_company_of_few(bits: int) -> None:
    """Of elements that bytes are made of."""
    count, outputs, halves = 576, 48, HALVES[bits]
    x = torch.randn(8, count, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = weight_of(outputs, count, bits, torch.bfloat16)
    results = []
    for num_rows in range(1, 9):
        operands, out = np.zeros(8 * count * 4, np.uint8), np.zeros((8, outputs), np.float32)
        prepare_rows(x.data_ptr(), 2 * count, num_rows, count, operands.ctypes.data, False, (0, 0), halves)
        product(
            operands.ctypes.data, num_rows, codes.data_ptr(), scales.data_ptr(), count, 0, outputs, out.ctypes.data,
            4 * outputs, 0, 0, False, (0, 0), halves,
        )  # fmt: skip
        results.append(out[:num_rows])
    for result in results:
        assert (result == results[-1][: len(result)]).all()


@pytest.mark.skipif(not HAS_BYTES, reason="no products of bytes")
def test_a_row_is_whole_numbers_of_16_bits_in_groups_of_32() -> None:
    """Their largest is 127 × 256 + 127; zeros and the smallest numbers are 0, and what is not finite stays so."""
    x = torch.randn(160, generator=torch.Generator().manual_seed(2)).mul(3)
    x[32:64] = 0
    x[64], x[96], x[128:] = torch.inf, torch.nan, 1e-39
    out = np.zeros(640, np.uint8)
    make_operand(x.data_ptr(), out.ctypes.data, 160, (0,) * 4)
    numbers = out[:320].view(np.int8).reshape(5, 2, 32).astype(np.int64)
    whole = torch.from_numpy(256 * numbers[:, 0] + numbers[:, 1])
    sides = out[320 : 320 + 5 * SIDE_BYTES].reshape(5, SIDE_BYTES)
    scales = torch.from_numpy(sides[:, :4].copy().view(np.float32)[:, 0])
    expected = (x[:32].double() / scales[0].double()).round()
    assert (whole[0] - expected).abs().max() <= 1 and whole[0].abs().max() == 32639
    assert not whole[[1, 4]].any() and scales[1] == 0 and scales[4] < 1e-42
    assert scales[2] == torch.inf and scales[3].isnan()
    sums = torch.from_numpy(sides[:, 4:8].copy().view(np.float32)[:, 0])
    assert sums[0] == scales[0] * whole[0].sum() and not sums[2:4].isfinite().any()
    assert sides[0, 8:12].view(np.int32)[0] == -128 * int(whole[0].sum())


@kernel
def unpack(weight, scales, first, outputs, count, room, codes):  # type: ignore[no-untyped-def]
    return rows_of(weight, scales, first, outputs, count, room, codes), row_stride(count, codes)


@pytest.mark.skipif(not HAS_TILES, reason="no tile unit")
@pytest.mark.parametrize("bits", [8, 4])
def test_unpacked_rows_are_those_of_torch_and_nothing_is_written_behind_them(bits: int) -> None:
    codes, scales = weight_of(64, 96, bits, torch.bfloat16)
    out = torch.full((33, 96 + PAD_BYTES // 2), torch.nan, dtype=torch.bfloat16)
    place, stride = unpack(codes.data_ptr(), scales.data_ptr(), 16, 32, 96, out.data_ptr(), HALVES[bits])
    assert (place, stride) == (out.data_ptr(), 2 * out.shape[1])
    assert torch.equal(out[:32, :96], dequantize(codes, scales, torch.bfloat16)[16:48])
    assert bool(out[32].isnan().all()) and bool(out[:, 96:].isnan().all())


def test_rows_of_a_full_weight_are_read_where_they_lie() -> None:
    assert unpack(1000, 0, 16, 32, 96, 5, ()) == (1000 + 16 * 2 * 96, 2 * 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_steps_are_as_near_to_float32_as_those_of_the_modules_own_layers(
    form: str, tied: bool, dtype: torch.dtype
) -> None:
    module = bfloat16_llama().to(dtype)
    if tied:
        module.lm_head.weight = module.model.embed_tokens.weight
    quantize_weights(module, form)
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
    quantize_weights(module, "int8")
    module.model.layers[1].mlp.up_proj = plain
    with caplog.at_level(logging.INFO, "anaphora.runtime"):
        forward = make_forward(module, inspect_model(module, 512), fast=True)
    assert isinstance(forward, FastForward) and forward._kernels == ()
    assert "some of its layers are quantised and some are not" in caplog.text


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_same_bits_whatever_the_number_of_threads(form: str) -> None:
    module = bfloat16_llama().to(torch.bfloat16)
    quantize_weights(module, form)
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
