"""Matrix products of a few rows with a weight of codes: int8 [out, in] times a scale, an element, for each output.

Knows addresses; has the interface of `linear`, which it takes the place of. A code becomes float32 (vectors), or
bfloat16 which holds it exactly (tiles), in registers and nearest cache: from memory come single bytes. Scales are
applied to the sums. With up to MAX_VECTOR_ROWS rows vectors are the faster way also where there are tiles: those need
each code as bfloat16 in memory first.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.linear import linear, prepare, tile_linear
from anaphora.runtime.kernels.products import AHEAD_BYTES
from anaphora.runtime.kernels.tiles import has_tiles
from anaphora.runtime.kernels.vectors import F32, I8, I16, I32, I64, Vectors, length, load_element, void

MAX_VECTOR_ROWS = 4
PANEL_OUTPUTS = 32


def panel_bytes(count: int) -> int:
    """Room that `linear_codes` needs for sums over `count` codes: a few outputs' weights as bfloat16."""
    return PANEL_OUTPUTS * count * 2


@kernel
def prepare_rows(source, stride, num_rows, count, out, use_tiles, element, codes):
    """Make operands for `product`; see linear.prepare."""
    if len(codes) == 1:
        prepare_codes(source, stride, num_rows, count, out, use_tiles, element)
    else:
        prepare(source, stride, num_rows, count, out, use_tiles, element)


@kernel
def product(
    x, num_rows, weight, scales, count, begin, end, out, out_stride, scratch, panel, use_tiles, element, codes
):  # fmt: skip
    """Outputs of a weight of codes (a tuple of 1, their bytes) or of elements (an empty one; no scales, no panel)."""
    if len(codes) == 1:
        linear_codes(
            x, num_rows, weight, scales, count, begin, end, out, out_stride, scratch, panel, use_tiles, element
        )  # fmt: skip
    else:
        linear(x, num_rows, weight, count, begin, end, out, out_stride, scratch, use_tiles, element)


@kernel
def prepare_codes(source, stride, num_rows, count, out, use_tiles, element):
    """Make operands for `linear_codes`; see linear.prepare."""
    if use_tiles and has_tiles() and num_rows > MAX_VECTOR_ROWS:
        prepare(source, stride, num_rows, count, out, use_tiles, element)
    else:
        for m in range(num_rows):
            widen(source + m * stride, out + m * count * 4, count, element)


@kernel
def linear_codes(x, num_rows, codes, scales, count, begin, end, out, out_stride, scratch, panel, use_tiles, element):
    """Outputs [begin, end) of rows x @ (codes × scales).T, float32; see linear.linear.

    codes: address of [at least end, count] bytes; scales: address of elements. count: as in products.dot. panel:
    address of `panel_bytes`. With tiles at least 16 outputs.
    """
    if use_tiles and has_tiles() and num_rows > MAX_VECTOR_ROWS:
        n = begin
        while n < end:
            if end - n < 16:
                n = end - 16
            outputs = PANEL_OUTPUTS if end - n >= PANEL_OUTPUTS else 16
            for i in range(outputs):
                unpack(codes + (n + i) * count, panel + i * count * 2, count, element)
            place = out + 4 * n
            tile_linear(x, num_rows, panel, count, 0, outputs, place, out_stride, scratch)
            scale_rows(place, out_stride, num_rows, scales, n, outputs, element)
            n += outputs
    else:
        vector_codes(x, num_rows, codes, count, begin, end, out, out_stride, element)
        scale_rows(out + 4 * begin, out_stride, num_rows, scales, begin, end - begin, element)


@kernel
def unpack_matrices(thread, num_threads, matrices, element):
    """A thread's share of codes × scales as elements.

    matrices: int64 [n, 5]: address of codes, of scales, how many rows, how many codes a row, address of elements.
    """
    for i in range(len(matrices)):
        codes, scales, num_rows = matrices[i, 0], matrices[i, 1], matrices[i, 2]
        count, out = matrices[i, 3], matrices[i, 4]
        for n in range(thread * num_rows // num_threads, (thread + 1) * num_rows // num_threads):
            factor = load_element(scales, n, element)
            unpack_scaled(codes + n * count, out + n * count * len(element), count, factor, element)


@kernel
def vector_codes(x, num_rows, codes, count, begin, end, out, out_stride, element):
    x_stride = 4 * count
    n = begin
    while n + 4 <= end:
        w = codes + n * count
        m = 0
        while m < num_rows:
            source, target = x + m * x_stride, out + m * out_stride + 4 * n
            left = num_rows - m
            if left >= 4:
                dot_codes(source, x_stride, w, count, target, out_stride, (0, 0, 0, 0), (0, 0, 0, 0), element)
            elif left == 3:
                dot_codes(source, x_stride, w, count, target, out_stride, (0, 0, 0), (0, 0, 0, 0), element)
            elif left == 2:
                dot_codes(source, x_stride, w, count, target, out_stride, (0, 0), (0, 0, 0, 0), element)
            else:
                dot_codes(source, x_stride, w, count, target, out_stride, (0,), (0, 0, 0, 0), element)
            m += 4
        n += 4
    while n < end:
        for m in range(num_rows):
            target = out + m * out_stride + 4 * n
            dot_codes(x + m * x_stride, x_stride, codes + n * count, count, target, out_stride, (0,), (0,), element)
        n += 1


@kernel
def scale_rows(out, out_stride, num_rows, scales, first, count, element):
    """Multiply rows of float32 by the scales from number `first` on."""
    for m in range(num_rows):
        for n in range(count):
            scale_float(out + m * out_stride, n, load_element(scales, first + n, element))


def _load_codes(v: Vectors, address: Any) -> Any:
    """`lanes` codes as float32."""
    b = v.builder
    raw = v.load(address, ir.VectorType(I8, v.lanes), 1)
    return b.sitofp(b.sext(raw, ir.VectorType(I32, v.lanes)), v.type)


def _dot_codes(v: Vectors, arguments: Any, sizes: tuple[int, ...]) -> None:
    x, x_stride, w, count, out, out_stride = arguments[:6]
    b, (num_x, num_w, _) = v.builder, sizes
    totals = [cgutils.alloca_once_value(b, v.zero) for _ in range(num_x * num_w)]
    xs = [b.add(x, b.mul(x_stride, v.number(i))) for i in range(num_x)]
    ws = [b.add(w, b.mul(count, v.number(j))) for j in range(num_w)]
    # One row of x leaves the CPU waiting for the weight: see products.dot.
    turns = [[j] for j in range(num_w)] if num_x == 1 else [list(range(num_w))]
    for turn in turns:
        with cgutils.for_range_slice(b, v.number(0), count, v.number(v.per_step), I64) as (k, _):
            places = [b.add(ws[j], k) for j in turn]
            if num_x == 1:
                v.fetch(v.at(places[0], AHEAD_BYTES))
            for offset in range(0, v.per_step, v.lanes):
                codes = [_load_codes(v, v.at(place, offset)) for place in places]
                for i, address in enumerate(xs):
                    operand = v.load_floats(v.at(b.add(address, b.mul(k, v.number(4))), 4 * offset))
                    for j, code in zip(turn, codes, strict=True):
                        total = totals[i * num_w + j]
                        b.store(v.fma(code, operand, b.load(total)), total)
    sums = [b.load(total) for total in totals]
    if len(sums) == 1:
        b.store(v.sum_lanes(sums[0]), b.inttoptr(out, F32.as_pointer()))
        return
    sums += [v.zero] * (-len(sums) % v.lanes)
    summed = [v.sum_each(sums[i : i + v.lanes]) for i in range(0, len(sums), v.lanes)]
    part = ir.VectorType(F32, num_w)
    for i in range(num_x):
        vector, first = summed[i * num_w // v.lanes], i * num_w % v.lanes
        mask = ir.Constant(ir.VectorType(I32, num_w), list(range(first, first + num_w)))
        row = b.add(out, b.mul(out_stride, v.number(i)))
        b.store(b.shuffle_vector(vector, vector, mask), b.inttoptr(row, part.as_pointer())).align = 4


@intrinsic
def dot_codes(tc, x, x_stride, w, count, out, out_stride, num_x, num_w, element):
    """out[i, j] = sum over `count` (see products.dot) of float32 x[i] × code w[j]. Strides in bytes."""
    sizes = (length(num_x), length(num_w), length(element))
    return void(_dot_codes, types.void(x, x_stride, w, count, out, out_stride, num_x, num_w, element), sizes)


@intrinsic
def widen(tc, source, out, count, element):
    """`count` elements (a multiple of lanes) as float32, in order."""

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        source, out, count = arguments[:3]
        with cgutils.for_range_slice(v.builder, v.number(0), count, v.number(v.lanes), I64) as (k, _index):
            value = v.load_elements(v.builder.add(source, v.builder.mul(k, v.number(v.element_bytes))))
            v.store_floats(value, v.builder.add(out, v.builder.mul(k, v.number(4))))

    return void(build, types.void(source, out, count, element), (length(element),))


@intrinsic
def unpack(tc, codes, out, count, element):
    """`count` codes (a multiple of lanes) as bfloat16: the upper half of a float32 holds all of one."""

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        codes, out, count = arguments[:3]
        b, narrow, wide = v.builder, ir.VectorType(I16, v.lanes), ir.VectorType(I32, v.lanes)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(v.lanes), I64) as (k, _index):
            bits = b.bitcast(_load_codes(v, b.add(codes, k)), wide)
            upper = b.trunc(b.lshr(bits, ir.Constant(wide, [16] * v.lanes)), narrow)
            place = b.inttoptr(b.add(out, b.mul(k, v.number(2))), narrow.as_pointer())
            b.store(upper, place).align = 2

    return void(build, types.void(codes, out, count, element), (length(element),))


@intrinsic
def unpack_scaled(tc, codes, out, count, factor, element):
    """`count` codes (a multiple of lanes) × a float32 as elements."""

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        codes, out, count, factor = arguments[:4]
        b, factors = v.builder, v.splat(factor)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(v.lanes), I64) as (k, _index):
            value = b.fmul(_load_codes(v, b.add(codes, k)), factors)
            v.store_elements(value, b.add(out, b.mul(k, v.number(v.element_bytes))))

    return void(build, types.void(codes, out, count, types.float32, element), (length(element),))


@intrinsic
def scale_float(tc, base, index, factor):
    """The float32 number `index` at `base`, times a factor."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        place = builder.gep(builder.inttoptr(arguments[0], F32.as_pointer()), [arguments[1]], source_etype=F32)
        builder.store(builder.fmul(builder.load(place, typ=F32), arguments[2]), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate
