"""Exponentials of vectors: for softmax, for the gate of an MLP. Knows addresses and elements."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.vectors import F32, I32, I64, Vectors, length, void

# 2 ** f for |f| <= 1/2, highest power first: fitted to Chebyshev points, relative error 1e-7 in float32.
_COEFFICIENTS = (1.5469732e-4, 1.3400433e-3, 9.6180253e-3, 5.5503272e-2, 2.4022651e-1, 6.9314718e-1, 1.0)

# Added to a float32 of at most 2 ** 22, it leaves the nearest integer in the lowest bits.
_ROUND = 12582912.0


def _power_of_two(v: Vectors, y: Any) -> Any:
    """2 ** y for y <= 0; about 1e-38 from -126 down; NaN of NaN."""
    b, wide = v.builder, ir.VectorType(I32, v.lanes)
    y = b.select(b.fcmp_ordered("<", y, v.constant(-126.0)), v.constant(-126.0), y)
    shifted = b.fadd(y, v.constant(_ROUND))
    f = b.fsub(y, v.each("rint", y))  # not `shifted - _ROUND`, which fast arithmetic would undo
    result = v.constant(_COEFFICIENTS[0])
    for factor in _COEFFICIENTS[1:]:
        result = v.fma(result, f, v.constant(factor))
    exponent = b.shl(b.bitcast(shifted, wide), ir.Constant(wide, [23] * v.lanes))
    power = b.bitcast(b.add(b.bitcast(result, wide), exponent), v.type)
    return b.select(b.fcmp_unordered("uno", y, y), y, power)


# The same to a relative error of 3e-6, for what is rounded to bfloat16. 2 ** 0 is 1: so to rescale sums that no larger
# score has joined, or to merge them with those of no keys at all, changes no bit.
_SHORT_COEFFICIENTS = (9.5828364e-3, 5.5906413e-2, 2.4024099e-1, 6.9312419e-1, 1.0)


def short_power_of_two(v: Vectors, y: Any) -> Any:
    """2 ** y; NaN of NaN and of minus infinity. Only for AVX-512, which every CPU with a tile unit has."""
    b, mask = v.builder, ir.IntType(16)
    whole = v.each("rint", y)
    f = b.fsub(y, whole)
    result = v.constant(_SHORT_COEFFICIENTS[0])
    for factor in _SHORT_COEFFICIENTS[1:]:
        result = v.fma(result, f, v.constant(factor))
    kinds = [v.type, v.type, v.type, mask, I32]
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(v.type, kinds), "llvm.x86.avx512.mask.scalef.ps.512"
    )
    current_rounding = 4
    return b.call(function, [result, whole, v.zero, ir.Constant(mask, -1), ir.Constant(I32, current_rounding)])


def _vectors_of(v: Vectors, count: Any, visit: Any) -> None:
    """visit(begin, whole vectors' mask None, or the last one's mask) for `count` numbers, `lanes` at a time."""
    b = v.builder
    whole = b.and_(count, v.number(-v.lanes))
    with cgutils.for_range_slice(b, v.number(0), whole, v.number(v.lanes), I64) as (begin, _):
        visit(begin, None)
    with b.if_then(b.icmp_signed("<", whole, count)):
        visit(whole, v.before(b.sub(count, whole)))


@intrinsic
def largest(tc, address, count):
    """The largest of `count` float32; NaN is passed over."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        v, (address, count) = Vectors(context, builder, 4), args
        lowest = v.constant(float("-inf"))
        best = cgutils.alloca_once_value(builder, lowest)

        def visit(begin: Any, mask: Any) -> None:
            value = v.load_floats(builder.add(address, builder.mul(begin, v.number(4))))
            if mask is not None:
                value = builder.select(mask, value, lowest)
            before = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), best)

        _vectors_of(v, count, visit)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(F32, [v.type]), f"llvm.vector.reduce.fmax.v{v.lanes}f32"
        )
        return builder.call(function, [builder.load(best)])

    return types.float32(types.int64, types.int64), generate


@intrinsic
def exponentials(tc, address, count, top, scale):
    """Put exp((x - top) × scale) in the place of each of `count` float32, none above `top`; returns their sum."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        v, (address, count, top, scale) = Vectors(context, builder, 4), args
        total = cgutils.alloca_once_value(builder, v.zero)
        factor = builder.fmul(scale, ir.Constant(F32, 1.4426950408889634))
        tops, factors = v.splat(top), v.splat(factor)

        def visit(begin: Any, mask: Any) -> None:
            place = builder.add(address, builder.mul(begin, v.number(4)))
            value = _power_of_two(v, builder.fmul(builder.fsub(v.load_floats(place), tops), factors))
            if mask is not None:
                value = builder.select(mask, value, v.zero)
            v.store_floats(value, place)
            builder.store(builder.fadd(builder.load(total), value), total)

        _vectors_of(v, count, visit)
        return v.sum_lanes(builder.load(total))

    return types.float32(types.int64, types.int64, types.float32, types.float32), generate


def _sigmoid(v: Vectors, x: Any) -> Any:
    b, one = v.builder, v.constant(1.0)
    power = _power_of_two(v, b.fmul(v.each("fabs", x), v.constant(-1.4426950408889634)))
    # exp of a negative number only, so that nothing overflows: e / (1 + e), or 1 / (1 + e).
    top = b.select(b.fcmp_ordered("<", x, v.zero), power, one)
    return b.fdiv(top, b.fadd(one, power))


def gated(v: Vectors, value: Any, up: Any, factors: tuple[Any, Any] | None = None) -> Any:
    """value × sigmoid(value × (linear + cubic × value²)) × up; factors: linear and cubic; None is SiLU."""
    b, inner = v.builder, value
    if factors is not None:
        inner = b.fmul(v.fma(b.fmul(value, value), factors[1], factors[0]), value)
    return b.fmul(b.fmul(value, _sigmoid(v, inner)), up)


@intrinsic
def gate(tc, gates, ups, out, count, linear, cubic, element):
    """out = g × sigmoid(linear × g + cubic × g³) × up for `count` float32, as elements.

    Reads and writes up to a multiple of the lanes.
    SiLU: 1 and 0. GELU in its tanh form: 2 × sqrt(2 / π), and 0.044715 times that.
    """

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        gates, ups, out, count, linear, cubic = arguments[:6]
        b, factors = v.builder, (v.splat(linear), v.splat(cubic))
        with cgutils.for_range_slice(b, v.number(0), count, v.number(v.lanes), I64) as (n, _):
            offset = b.mul(n, v.number(4))
            product = gated(v, v.load_floats(b.add(gates, offset)), v.load_floats(b.add(ups, offset)), factors)
            v.store_elements(product, b.add(out, b.mul(n, v.number(v.element_bytes))))

    floats = (types.float32, types.float32)
    return void(build, types.void(gates, ups, out, count, *floats, element), (length(element),))


# tanh(x) / x for small x, in x², highest power first.
_TANH = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)
_TANH_SMALL = 0.25


@intrinsic
def soft_cap(tc, address, count, inner, outer):
    """Put outer × tanh(inner × x) in the place of each of `count` float32.

    Behind them, up to a multiple of the lanes, what is there is read and put back: it must be this thread's own.
    """

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        b, (address, count) = v.builder, arguments[:2]
        inner, outer = v.splat(arguments[2]), v.splat(arguments[3])

        def visit(begin: Any, mask: Any) -> None:
            place = b.add(address, b.mul(begin, v.number(4)))
            before = v.load_floats(place)
            x = b.fmul(before, inner)
            square, size = b.fmul(x, x), v.each("fabs", x)
            near = v.constant(_TANH[0])
            for factor in _TANH[1:]:
                near = v.fma(near, square, v.constant(factor))
            power = _power_of_two(v, b.fmul(size, v.constant(-2 * 1.4426950408889634)))
            far = b.fdiv(b.fsub(v.constant(1.0), power), b.fadd(v.constant(1.0), power))
            far = b.select(b.fcmp_ordered("<", x, v.zero), b.fneg(far), far)
            result = b.select(b.fcmp_ordered("<", size, v.constant(_TANH_SMALL)), b.fmul(near, x), far)
            result = b.fmul(result, outer)
            v.store_floats(result if mask is None else b.select(mask, result, before), place)

        _vectors_of(v, count, visit)

    return void(build, types.void(address, count, types.float32, types.float32), (4,))
