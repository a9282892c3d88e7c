"""Exponentials of vectors: for softmax, for the gate of an MLP. Knows addresses and elements."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.vectors import F32, I32, I64, Vectors, length, void


def _exp(v: Vectors, x: Any) -> Any:
    """exp of x <= 0, relative error below 1e-6; 0 from -87 down; NaN of NaN. 2 ** n × exp(f) with |f| <= ln 2 / 2."""
    b = v.builder
    n = v.each("rint", b.fmul(x, v.constant(1.4426950408889634)))
    # ln 2 in two parts: the first is exact in float32, and so is its product with n.
    f = v.fma(n, v.constant(-0.693145751953125), x)
    f = v.fma(n, v.constant(-1.4286068203094172e-06), f)
    result = v.constant(1 / 720)
    for factor in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        result = v.fma(result, f, v.constant(factor))
    wide = ir.VectorType(I32, v.lanes)
    is_small = b.fcmp_ordered("<", x, v.constant(-87.0))
    is_nan = b.fcmp_unordered("uno", x, x)
    power = b.fptosi(b.select(b.or_(is_small, is_nan), v.zero, n), wide)
    bits = b.shl(b.add(power, ir.Constant(wide, [127] * v.lanes)), ir.Constant(wide, [23] * v.lanes))
    return b.select(is_nan, x, b.select(is_small, v.zero, b.fmul(result, b.bitcast(bits, v.type))))


@intrinsic
def largest(tc, address, count):
    """The largest of `count` float32; NaN is passed over."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        v, (begin, count) = Vectors(context, builder, 4), args
        lowest = ir.Constant(v.type, [float("-inf")] * v.lanes)
        best = cgutils.alloca_once_value(builder, lowest)
        with cgutils.for_range_slice(builder, v.number(0), count, v.number(v.lanes), I64) as (t, _):
            value = v.load_floats(builder.add(begin, builder.mul(t, v.number(4))))
            value = builder.select(v.before(builder.sub(count, t)), value, lowest)
            before = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), best)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(F32, [v.type]), f"llvm.vector.reduce.fmax.v{v.lanes}f32"
        )
        return builder.call(function, [builder.load(best)])

    return types.float32(types.int64, types.int64), generate


@intrinsic
def exponentials(tc, address, count, top, scale):
    """Put exp((x - top) × scale) in the place of each of `count` float32, none above `top`; returns their sum."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        v, (begin, count, top, scale) = Vectors(context, builder, 4), args
        total = cgutils.alloca_once_value(builder, v.zero)
        tops, scales = v.splat(top), v.splat(scale)
        with cgutils.for_range_slice(builder, v.number(0), count, v.number(v.lanes), I64) as (t, _):
            place = builder.add(begin, builder.mul(t, v.number(4)))
            value = _exp(v, builder.fmul(builder.fsub(v.load_floats(place), tops), scales))
            value = builder.select(v.before(builder.sub(count, t)), value, v.zero)
            v.store_floats(value, place)
            builder.store(builder.fadd(builder.load(total), value), total)
        return v.sum_lanes(builder.load(total))

    return types.float32(types.int64, types.int64, types.float32, types.float32), generate


@intrinsic
def gate(tc, gates, ups, out, count, element):
    """out = SiLU(gate) × up for `count` float32 (a multiple of 16), as elements."""

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        gates, ups, out, count = arguments[:4]
        b, one = v.builder, v.constant(1.0)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(v.lanes), I64) as (n, _):
            offset = b.mul(n, v.number(4))
            value = v.load_floats(b.add(gates, offset))
            power = _exp(v, b.fneg(v.each("fabs", value)))
            # exp of a negative number only, so that nothing overflows: e / (1 + e), or 1 / (1 + e).
            top = b.select(b.fcmp_ordered("<", value, v.zero), power, one)
            sigmoid = b.fdiv(top, b.fadd(one, power))
            product = b.fmul(b.fmul(value, sigmoid), v.load_floats(b.add(ups, offset)))
            v.store_elements(product, b.add(out, b.mul(n, v.number(v.element_bytes))))

    return void(build, types.void(gates, ups, out, count, element), (length(element),))


@intrinsic
def shorten(tc, source, count, out, room):
    """`count` float32 as bfloat16, and zeros behind them up to `room` (a multiple of 16)."""

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        source, count, out, room = arguments
        b = v.builder
        with cgutils.for_range_slice(b, v.number(0), room, v.number(v.lanes), I64) as (n, _):
            value = v.load_floats(b.add(source, b.mul(n, v.number(4))))
            value = b.select(v.before(b.sub(count, n)), value, v.zero)
            v.store_elements(value, b.add(out, b.mul(n, v.number(2))))

    return void(build, types.void(source, count, out, room), (2,))
