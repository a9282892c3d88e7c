"""Matrix products of a few rows with a weight of codes, in the place of `linear`'s with one of elements.

Knows addresses, and which of three ways a CPU has. Up to MAX_VECTOR_ROWS rows read codes only: as bytes that are
multiplied with bytes (`byte_products`, rows of bfloat16), or as float32 made in registers. For more rows the tile unit
gets 32 outputs at a time as bfloat16 from the nearest cache. Which way is taken follows from constants, the number of
rows and the CPU; a row's results in the first two ways do not depend on how many rows there are.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.byte_products import has_byte_products, multiply_bytes, quantize_row
from anaphora.runtime.kernels.code_layout import (
    BLOCK,
    GROUP,
    PANEL_OUTPUTS,
    Codes,
    row_bytes,
    scale_bytes,
)
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.linear import linear, prepare
from anaphora.runtime.kernels.tiles import has_tiles, multiply_tiles
from anaphora.runtime.kernels.unpacking import unpack_columns
from anaphora.runtime.kernels.vectors import F32, I64, Vectors, each_group, length

MAX_VECTOR_ROWS = 8


@kernel
def prepare_rows(source, stride, num_rows, count, out, use_tiles, element, codes):
    """Make operands for `product`; see linear.prepare."""
    if len(codes) == 0:
        prepare(source, stride, num_rows, count, out, use_tiles, element)
    elif use_tiles and has_tiles() and num_rows > MAX_VECTOR_ROWS:
        for m in range((num_rows + 15) // 16 * 16):
            copy_bytes(source + m * stride, out + m * 2 * count, 2 * count)
    elif has_byte_products() and len(element) == 2:
        for m in range(num_rows):
            quantize_row(source + m * stride, out + m * 4 * count, count, element)
    else:
        for m in range(num_rows):
            widen(source + m * stride, out + m * 4 * count, count, element)


@kernel
def product(
    x, num_rows, weight, scales, count, begin, end, out, out_stride, scratch, panel, use_tiles, element, codes
):  # fmt: skip
    """Outputs [begin, end) of rows x @ weight.T, float32; see linear.linear.

    weight, scales: addresses, see code_layout; of a weight of elements there are no scales. Of codes, `begin` and `end`
    are multiples of 16 and `count` is one of 32. panel: address of `panel_bytes`.
    """
    if len(codes) == 0:
        linear(x, num_rows, weight, count, begin, end, out, out_stride, scratch, use_tiles, element)
    elif use_tiles and has_tiles() and num_rows > MAX_VECTOR_ROWS:
        _by_tiles(x, num_rows, weight, scales, count, begin, end, out, out_stride, panel, element, codes)
    else:
        _by_vectors(x, num_rows, weight, scales, count, begin, end, out, out_stride, element, codes)


@kernel
def _by_tiles(x, num_rows, weight, scales, count, begin, end, out, out_stride, panel, element, codes):
    stride, block, one, two = 2 * count, 2 * BLOCK * count, (0,), (0, 0)
    code_step, scale_step = row_bytes(count, codes, element), scale_bytes(count, codes)
    n = begin
    while n < end:
        outputs = min(PANEL_OUTPUTS, end - n)
        for i in range(0, outputs, BLOCK):
            place = panel + i // BLOCK * block
            unpack_columns(weight + (n + i) * code_step, scales + (n + i) * scale_step, count, place, 0, codes)
        m = 0
        while m < num_rows:
            source, target = x + m * stride, out + m * out_stride + 4 * n
            if num_rows - m > 16:
                if outputs == PANEL_OUTPUTS:
                    multiply_tiles(source, stride, panel, block, count, target, out_stride, two, two)
                else:
                    multiply_tiles(source, stride, panel, block, count, target, out_stride, two, one)
            elif outputs == PANEL_OUTPUTS:
                multiply_tiles(source, stride, panel, block, count, target, out_stride, one, two)
            else:
                multiply_tiles(source, stride, panel, block, count, target, out_stride, one, one)
            m += 32
        n += outputs


@kernel
def _by_vectors(x, num_rows, weight, scales, count, begin, end, out, out_stride, element, codes):
    code_step, scale_step = row_bytes(count, codes, element), scale_bytes(count, codes)
    for n in range(begin, end, BLOCK):
        w, s = weight + n * code_step, scales + n * scale_step
        m = 0
        while m < num_rows:
            source, target, left = x + m * 4 * count, out + m * out_stride + 4 * n, num_rows - m
            if left >= 4:
                _multiply(source, w, s, count, target, out_stride, (0, 0, 0, 0), element, codes)
            elif left == 3:
                _multiply(source, w, s, count, target, out_stride, (0, 0, 0), element, codes)
            elif left == 2:
                _multiply(source, w, s, count, target, out_stride, (0, 0), element, codes)
            else:
                _multiply(source, w, s, count, target, out_stride, (0,), element, codes)
            m += 4


@kernel
def _multiply(x, codes_at, scales_at, count, out, out_stride, num_rows, element, codes):
    if has_byte_products() and len(element) == 2:
        multiply_bytes(x, 4 * count, codes_at, scales_at, count, out, out_stride, num_rows, codes)
    else:
        multiply_floats(x, 4 * count, codes_at, scales_at, count, out, out_stride, num_rows, codes)


def _multiply_floats(v: Vectors, arguments: Any, num_rows: int, num_halves: int) -> None:
    x, x_stride, codes, scales, count, out, out_stride = arguments[:7]
    b, layout = v.builder, Codes(v, num_halves)
    rows = [b.add(x, b.mul(x_stride, v.number(i))) for i in range(num_rows)]
    for first in range(0, BLOCK, v.lanes):
        totals = [cgutils.alloca_once_value(b, v.zero) for _ in rows]
        with each_group(v, count, GROUP) as g:
            place = b.add(codes, b.mul(g, v.number(layout.group_bytes)))
            sides = layout.load_sides(b.add(scales, b.mul(g, v.number(layout.side_bytes))), first)
            fours = layout.load_bytes(place, first, v.lanes)
            for row, total in zip(rows, totals, strict=True):
                numbers = b.add(row, b.mul(g, v.number(4 * GROUP)))
                sum_, plain = v.zero, v.zero
                for k, code in enumerate(code for four in fours for code in layout.floats(four)):
                    number = v.splat(v.load(v.at(numbers, 4 * k), F32, 4))
                    sum_, plain = v.fma(code, number, sum_), b.fadd(plain, number)
                more = v.fma(sum_, sides[0], b.load(total))
                b.store(v.fma(layout.minima(sides), plain, more), total)
        for i, total in enumerate(totals):
            v.store_floats(b.load(total), v.at(b.add(out, b.mul(out_stride, v.number(i))), 4 * first))


@intrinsic
def multiply_floats(tc, x, x_stride, codes, scales, count, out, out_stride, num_rows, halves):
    """out[i, 16 outputs] = sum over `count` inputs of float32 x[i] × weight. Strides in bytes."""
    sizes = length(num_rows), length(halves)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        if sizes[1]:
            _multiply_floats(Vectors(context, builder, 4), arguments, *sizes)
        return context.get_dummy_value()

    return types.void(x, x_stride, codes, scales, count, out, out_stride, num_rows, halves), generate


@intrinsic
def widen(tc, source, out, count, element):
    """`count` elements (a multiple of lanes) as float32, in order."""
    element_bytes = length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        v, (source, out, count) = Vectors(context, builder, element_bytes), arguments[:3]
        with cgutils.for_range_slice(builder, v.number(0), count, v.number(v.lanes), I64) as (k, _index):
            value = v.load_elements(builder.add(source, builder.mul(k, v.number(element_bytes))))
            v.store_floats(value, builder.add(out, builder.mul(k, v.number(4))))
        return context.get_dummy_value()

    return types.void(source, out, count, element), generate


@intrinsic
def copy_bytes(tc, source, out, count):
    """`count` bytes, as many as there are."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        source, out, count = arguments
        to, place = (builder.inttoptr(address, cgutils.voidptr_t) for address in (out, source))
        cgutils.raw_memcpy(builder, to, place, count, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
