"""Products of codes with bytes, by CPUs that have such an instruction (AVX512-VNNI).

Knows addresses and the layout of codes. Rows of bfloat16 become whole numbers of 16 bits in groups of 32, each with a
scale: finer than bfloat16 is itself, for all that matters in a sum. A number is two bytes, q = 256 × high + low, so a
sum over a group takes two products and is exact; what is rounded is the sum of the groups, in float32.

    operand of a row    [inputs / 32, high or low, 32] bytes, then for each group SIDE_BYTES: its scale and the sum of
                        what it stands for (float32), -128 times the sum of its whole numbers (int32)

A CPU without the instruction compiles every function here to nothing, and `has_byte_products` to False.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.code_layout import BLOCK, GROUP, Codes
from anaphora.runtime.kernels.products import AHEAD_BYTES
from anaphora.runtime.kernels.vectors import F32, I8, I32, LINE_BYTES, Vectors, each_group, features, length

LARGEST = 32639
"""127 × 256 + 127: both bytes of a number are signed."""

SIDE_BYTES = 16

_WIDE, _BYTES = ir.VectorType(I32, BLOCK), ir.VectorType(I8, 4 * BLOCK)


def _available(context: Any) -> bool:
    found = features(context)
    return "+avx512vnni" in found and "+avx512bw" in found


@intrinsic
def has_byte_products(tc):
    return types.boolean(), lambda context, builder, _, args: ir.Constant(ir.IntType(1), int(_available(context)))


def _constant(number: int) -> Any:
    return ir.Constant(_WIDE, [number] * BLOCK)


def _spread(v: Vectors, address: Any) -> Any:
    """Four bytes, or an int32, in every lane."""
    undefined = ir.Constant(_WIDE, ir.Undefined)
    single = v.builder.insert_element(undefined, v.load(address, I32, 4), ir.Constant(I32, 0))
    return v.builder.shuffle_vector(single, undefined, _constant(0))


def _add_products(v: Vectors, total: Any, codes: Any, numbers: Any) -> Any:
    """total + products of four unsigned codes with four signed bytes, lane by lane."""
    function = cgutils.get_or_insert_function(
        v.builder.module, ir.FunctionType(_WIDE, [_WIDE, _BYTES, _BYTES]), "llvm.x86.avx512.vpdpbusd.512"
    )
    return v.builder.call(function, [total, v.builder.bitcast(codes, _BYTES), v.builder.bitcast(numbers, _BYTES)])


def _group_sum(v: Vectors, weights: list[Any], numbers: Any, offset: Any) -> Any:
    """Sum over a group, as int32. offset: address of what stands for -128 in each code, or None."""
    total = _constant(0)
    for j, weight in enumerate(weights):
        total = _add_products(v, total, weight, _spread(v, v.at(numbers, 4 * j)))
    total = v.builder.shl(total, _constant(8))
    if offset is not None:
        total = v.builder.add(total, _spread(v, offset))
    for j, weight in enumerate(weights):
        total = _add_products(v, total, weight, _spread(v, v.at(numbers, GROUP + 4 * j)))
    return total


def _multiply(v: Vectors, arguments: Any, num_rows: int, num_halves: int) -> None:
    x, x_stride, codes, scales, count, out, out_stride = arguments[:7]
    b, layout = v.builder, Codes(v, num_halves)
    rows = [b.add(x, b.mul(x_stride, v.number(i))) for i in range(num_rows)]
    totals = [cgutils.alloca_once_value(b, v.zero) for _ in rows]
    with each_group(v, count, GROUP) as g:
        place = b.add(codes, b.mul(g, v.number(layout.group_bytes)))
        side_place = b.add(scales, b.mul(g, v.number(layout.side_bytes)))
        for offset in range(0, layout.group_bytes, LINE_BYTES):
            v.fetch(v.at(place, AHEAD_BYTES + offset))
        v.fetch(v.at(side_place, AHEAD_BYTES // 4))
        weights, sides = layout.load_bytes(place), layout.load_sides(side_place)
        for row, total in zip(rows, totals, strict=True):
            numbers = b.add(row, b.mul(g, v.number(2 * GROUP)))
            side = b.add(b.add(row, b.mul(count, v.number(2))), b.mul(g, v.number(SIDE_BYTES)))
            exact = _group_sum(v, weights, numbers, v.at(side, 8) if layout.bits == 8 else None)
            factor = b.fmul(sides[0], v.splat(v.load(side, F32, 4)))
            more = v.fma(b.sitofp(exact, v.type), factor, b.load(total))
            if layout.bits == 4:
                more = v.fma(sides[1], v.splat(v.load(v.at(side, 4), F32, 4)), more)
            b.store(more, total)
    for i, total in enumerate(totals):
        v.store_floats(b.load(total), b.add(out, b.mul(out_stride, v.number(i))))


@intrinsic
def multiply_bytes(tc, x, x_stride, codes, scales, count, out, out_stride, num_rows, halves):
    """out[i, 16 outputs] = sum over `count` inputs of operand x[i] × weight, float32. Strides in bytes."""
    sizes = length(num_rows), length(halves)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        if _available(context) and sizes[1]:
            _multiply(Vectors(context, builder, 4), arguments, *sizes)
        return context.get_dummy_value()

    return types.void(x, x_stride, codes, scales, count, out, out_stride, num_rows, halves), generate


def _reduce(v: Vectors, name: str, value: Any) -> Any:
    function = cgutils.get_or_insert_function(
        v.builder.module, ir.FunctionType(I32, [_WIDE]), f"llvm.vector.reduce.{name}.v{BLOCK}i32"
    )
    return v.builder.call(function, [value])


def _quantize(v: Vectors, arguments: Any) -> None:
    source, out, count = arguments[:3]
    b, largest, kind = v.builder, ir.Constant(F32, float(LARGEST)), ir.VectorType(I8, BLOCK)
    with each_group(v, count, GROUP) as g:
        place = b.add(source, b.mul(g, v.number(GROUP * v.element_bytes)))
        parts = [v.load_elements(v.at(place, BLOCK * v.element_bytes * i)) for i in range(2)]
        # Magnitudes by their bits: what is not a number is larger than all others, and so is no scale made of it.
        bits = [b.and_(b.bitcast(part, _WIDE), _constant(0x7FFFFFFF)) for part in parts]
        top = b.bitcast(_reduce(v, "umax", b.select(b.icmp_unsigned(">", *bits), *bits)), F32)
        is_tiny = b.fcmp_ordered("<", top, ir.Constant(F32, 2.0**-110))  # whose inverse would be infinite
        inverse = b.select(is_tiny, ir.Constant(F32, 0.0), b.fdiv(largest, top))
        scale = b.fdiv(top, largest)
        target, total = b.add(out, b.mul(g, v.number(2 * GROUP))), _constant(0)
        for i, part in enumerate(parts):
            whole = b.fptosi(v.each("rint", b.fmul(part, v.splat(inverse))), _WIDE)
            total = b.add(total, whole)
            high = b.ashr(b.add(whole, _constant(128)), _constant(8))
            for offset, value in ((0, high), (GROUP, whole)):
                address = b.inttoptr(v.at(target, offset + BLOCK * i), kind.as_pointer())
                b.store(b.trunc(value, kind), address).align = 1
        sum_ = _reduce(v, "add", total)
        side = b.add(b.add(out, b.mul(count, v.number(2))), b.mul(g, v.number(SIDE_BYTES)))
        numbers = scale, b.fmul(scale, b.sitofp(sum_, F32)), b.mul(sum_, ir.Constant(I32, -128))
        for offset, number in zip((0, 4, 8), numbers, strict=True):
            b.store(number, b.inttoptr(v.at(side, offset), number.type.as_pointer())).align = 4


@intrinsic
def quantize_row(tc, source, out, count, element):
    """Make the operand of `count` elements. out: room for 4 × count bytes."""
    element_bytes = length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        if _available(context):
            _quantize(Vectors(context, builder, element_bytes), arguments)
        return context.get_dummy_value()

    return types.void(source, out, count, element), generate
