"""Sums of products over vectors in registers: for linear parts, for scores, for weighted values.

Knows addresses, elements and operands as `vectors` defines them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.vectors import F32, I32, I64, Vectors, length, void

AHEAD_BYTES = 2048
"""How far ahead of its use a weight is asked for: as far as the CPU gets while memory answers."""


def _dot(v: Vectors, arguments: Any, sizes: tuple[int, ...]) -> None:
    x, x_stride, w, w_stride, count, out, out_stride = arguments[:7]
    b, (num_x, num_w, _) = v.builder, sizes
    totals = [cgutils.alloca_once_value(b, v.zero) for _ in range(num_x * num_w)]
    xs = [x]
    ws = [w]
    for _ in range(num_x - 1):
        xs.append(b.add(xs[-1], x_stride))
    for _ in range(num_w - 1):
        ws.append(b.add(ws[-1], w_stride))
    whole = b.and_(count, v.number(-v.per_step))
    # One row of x leaves the CPU waiting for the weight, which comes fastest in the order in which it lies in memory.
    turns = [[j] for j in range(num_w)] if num_x == 1 else [list(range(num_w))]
    for turn in turns:
        with cgutils.for_range_slice(b, v.number(0), whole, v.number(v.per_step), I64) as (k, _):
            w_offset = b.mul(k, v.number(v.element_bytes))
            x_offset = b.mul(k, v.number(4))
            places = [b.add(ws[j], w_offset) for j in turn]
            if num_x == 1:
                v.fetch(v.at(places[0], AHEAD_BYTES))
            elements = [v.load_step(place) for place in places]
            for i, address in enumerate(xs):
                operand = v.load_operand(b.add(address, x_offset))
                for j, element in zip(turn, elements, strict=True):
                    total = totals[i * num_w + j]
                    b.store(v.multiply(element, operand, b.load(total)), total)
    with b.if_then(b.icmp_signed("<", whole, count), likely=False):
        _add_rest(v, whole, count, xs, ws, totals)
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


def _add_rest(v: Vectors, begin: Any, count: Any, xs: list[Any], ws: list[Any], totals: list[Any]) -> None:
    """Products of the numbers [begin, count), one by one, into the first lane of each total."""
    b, first = v.builder, ir.Constant(I32, 0)
    with cgutils.for_range_slice(b, begin, count, v.number(1), I64) as (k, _):
        elements = [v.load_element(w, k) for w in ws]
        for i, x in enumerate(xs):
            operand = v.load(b.add(x, b.mul(k, v.number(4))), F32, 4)
            for j, element in enumerate(elements):
                total = b.load(totals[i * len(ws) + j])
                more = b.fadd(b.extract_element(total, first), b.fmul(element, operand))
                b.store(b.insert_element(total, more, first), totals[i * len(ws) + j])


@intrinsic
def dot(tc, x, x_stride, w, w_stride, count, out, out_stride, num_x, num_w, element):
    """out[i, j] = sum over `count` of operand x[i] × element w[j], in float32. Strides in bytes."""
    sizes = (length(num_x), length(num_w), length(element))
    return void(_dot, types.void(x, x_stride, w, w_stride, count, out, out_stride, num_x, num_w, element), sizes)


def _score(v: Vectors, arguments: Any, sizes: tuple[int, ...]) -> None:
    query, keys, rows, out = arguments[:4]
    steps = sizes[0] * 16 // v.per_step
    rest = range(steps * v.per_step, sizes[0] * 16, v.lanes)  # where half a step is left
    operands = [v.load_operand(v.at(query, 4 * i * v.per_step)) for i in range(steps)]
    last = [v.load_floats(v.at(query, 4 * n)) for n in rest]
    totals = []
    for t in range(v.lanes):
        key = v.builder.add(keys, v.load(v.at(rows, 8 * t), I64, 8))
        total = v.zero
        for i in range(steps):
            total = v.multiply(v.load_step(v.at(key, i * v.per_step * v.element_bytes)), operands[i], total)
        for n, operand in zip(rest, last, strict=True):
            total = v.fma(v.load_elements(v.at(key, n * v.element_bytes)), operand, total)
        totals.append(total)
    v.store_floats(v.sum_each(totals), out)


@intrinsic
def score(tc, query, keys, rows, out, head_dim, element):
    """out[t] = query · key at `keys + rows[t]` for `lanes` tokens. head_dim: a tuple of a 16th of its length."""
    sizes = (length(head_dim), length(element))
    return void(_score, types.void(query, keys, rows, out, head_dim, element), sizes)


def _weigh(v: Vectors, arguments: Any, sizes: tuple[int, ...]) -> None:
    weights, weights_stride, values, rows, count, out, out_stride = arguments[:7]
    b, (num_heads, sixteenths, _) = v.builder, sizes
    width = sixteenths * 16 // v.lanes
    totals = [cgutils.alloca_once_value(b, v.zero) for _ in range(num_heads * width)]
    with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (t, _):
        row = b.add(values, v.load(b.add(rows, b.mul(t, v.number(8))), I64, 8))
        value = [v.load_elements(v.at(row, i * v.lanes * v.element_bytes)) for i in range(width)]
        for h in range(num_heads):
            address = b.add(weights, b.add(b.mul(t, v.number(4)), b.mul(weights_stride, v.number(h))))
            weight = v.splat(v.load(address, F32, 4))
            for i in range(width):
                total = totals[h * width + i]
                b.store(v.fma(weight, value[i], b.load(total)), total)
    for h in range(num_heads):
        for i in range(width):
            address = b.add(out, b.mul(out_stride, v.number(h)))
            v.store_floats(b.load(totals[h * width + i]), v.at(address, 4 * i * v.lanes))


@intrinsic
def weigh(tc, weights, weights_stride, values, rows, count, out, out_stride, num_heads, head_dim, element):
    """out[h] = sum over t < count of weights[h, t] × value at `values + rows[t]`; float32 out, strides in bytes."""
    sizes = (length(num_heads), length(head_dim), length(element))
    signature = types.void(weights, weights_stride, values, rows, count, out, out_stride, num_heads, head_dim, element)
    return void(_weigh, signature, sizes)


@intrinsic
def spread(tc, source, out, count, element):
    """Make operands of `count` elements for `dot` and `score`."""

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        b, (source, out, count) = v.builder, arguments[:3]
        whole = b.and_(count, v.number(-v.per_step))
        with cgutils.for_range_slice(b, v.number(0), whole, v.number(v.per_step), I64) as (k, _):
            place = b.add(out, b.mul(k, v.number(4)))
            for i, part in enumerate(v.load_step(b.add(source, b.mul(k, v.number(v.element_bytes))))):
                v.store_floats(part, v.at(place, 4 * i * v.lanes))
        with cgutils.for_range_slice(b, whole, count, v.number(1), I64) as (k, _):
            place = b.inttoptr(b.add(out, b.mul(k, v.number(4))), F32.as_pointer())
            b.store(v.load_element(source, k), place).align = 4

    return void(build, types.void(source, out, count, element), (length(element),))
