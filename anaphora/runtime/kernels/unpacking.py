"""Codes as bfloat16, for the tile unit: rows as they lie in a full weight, or columns as operands.

Knows LLVM and the layout of codes; knows nothing of products. A number is rounded to the nearest bfloat16, ties to
even, as torch does it. A CPU without tiles compiles every function here to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.code_layout import BLOCK, GROUP, Codes, row_bytes, scale_bytes
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.tiles import emit_tiles
from anaphora.runtime.kernels.vectors import F32, I8, I16, I32, I64, LINE_BYTES, Vectors, each_group, length, rounded
from anaphora.runtime.kernels.vectors import features as cpu_features

PAD_BYTES = LINE_BYTES
"""Behind each unpacked row, so that the rows of a tile lie in different sets of the cache."""

_WIDE, _ROW = ir.VectorType(I32, BLOCK), ir.VectorType(I16, GROUP)


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's type of this name, which llvmlite has not."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


def _nearest(context: Any, v: Vectors, low: Any, high: Any) -> Any:
    """Two vectors of 16 float32, one behind the other, as 32 bfloat16."""
    b = v.builder
    if "+avx512bf16" not in cpu_features(context):
        lanes = ir.Constant(ir.VectorType(I32, GROUP), list(range(GROUP)))
        return b.shuffle_vector(rounded(b, low, BLOCK), rounded(b, high, BLOCK), lanes)
    kind = ir.FunctionType(ir.VectorType(_Bfloat(), GROUP), [v.type, v.type])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return b.bitcast(b.call(function, [high, low]), _ROW)


_Group = tuple[Any, Any, Any, Any]
"""Addresses of codes and scales of a group of 16 outputs, of what is made, and its stride."""


def _unpacking(build: Callable[[Any, Codes, _Group], None], bytes_of_group: int) -> Any:
    """For 16 outputs × `count` inputs: `build(context, layout, group)`; `out` goes on by bytes_of_group each time."""

    def typed(tc, codes, scales, count, out, stride, halves):
        size = length(halves)

        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            def each(v: Vectors, _: Any, arguments: Any) -> None:
                codes, scales, count, out, stride = arguments[:5]
                layout, b = Codes(v, size), v.builder
                with each_group(v, count, GROUP) as g:
                    steps = (codes, layout.group_bytes), (scales, layout.side_bytes), (out, bytes_of_group)
                    places = [b.add(begin, b.mul(g, v.number(step))) for begin, step in steps]
                    build(context, layout, (*places, stride))

            return emit_tiles(context, builder, each, arguments) if size else context.get_dummy_value()

        return types.void(codes, scales, count, out, stride, halves), generate

    return typed


def _turned(v: Vectors, rows: list[Any]) -> list[Any]:
    """8 or 4 vectors of 16 outputs × 4 bytes -> as many, in which an output's bytes are neighbours."""
    low = ir.Constant(_WIDE, [i // 2 + 16 * (i % 2) for i in range(16)])
    high = ir.Constant(_WIDE, [8 + i // 2 + 16 * (i % 2) for i in range(16)])
    half = len(rows) // 2
    for _ in range(half.bit_length()):
        pairs = list(zip(rows[:half], rows[half:], strict=True))
        rows = [v.builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in (low, high)]
    return rows


def _as_rows(context: Any, layout: Codes, group: _Group) -> None:
    codes, scales, out, stride = group
    v, b = layout.v, layout.v.builder
    sides = layout.load_sides(scales)
    raw = [v.load(v.at(codes, LINE_BYTES * j), _WIDE, 4) for j in range(layout.bits)]
    # Through memory, which brings an output's bytes and scales wherever they are needed: what moves numbers between
    # lanes is what such a CPU has least of. LLVM must not see through it.
    room = cgutils.alloca_once(b, ir.ArrayType(F32, BLOCK * (2 + layout.bits)))
    room.align = LINE_BYTES
    place = b.ptrtoint(room, I64)
    for i, vector in enumerate((sides[0], layout.minima(sides), *_turned(v, raw))):
        b.store(vector, b.inttoptr(v.at(place, LINE_BYTES * i), vector.type.as_pointer())).align = LINE_BYTES
    b.asm(ir.FunctionType(ir.VoidType(), [I64]), "", "r,~{memory}", [place], True)
    for output in range(BLOCK):
        scale, low = (v.splat(v.load(v.at(place, 4 * (output + BLOCK * i)), F32, 4)) for i in range(2))
        begin = 2 * LINE_BYTES + 4 * layout.bits * output
        bytes_ = [
            b.zext(v.load(v.at(place, begin + BLOCK * i), ir.VectorType(I8, BLOCK), 1), _WIDE)
            for i in range(layout.bits // 4)
        ]
        if layout.bits == 4:
            (both,) = bytes_
            bytes_ = [b.and_(both, ir.Constant(_WIDE, [15] * BLOCK)), b.lshr(both, ir.Constant(_WIDE, [4] * BLOCK))]
        first, second = (v.fma(b.uitofp(one, v.type), scale, low) for one in bytes_)
        address = b.add(out, b.mul(stride, v.number(output)))
        b.store(_nearest(context, v, first, second), b.inttoptr(address, _ROW.as_pointer())).align = 2


def _as_columns(context: Any, layout: Codes, group: _Group) -> None:
    codes, scales, out, _ = group
    v, b = layout.v, layout.v.builder
    sides = layout.load_sides(scales)
    low, mask = layout.minima(sides), [i // 2 + BLOCK * (i % 2) for i in range(GROUP)]
    values = [v.fma(one, sides[0], low) for four in layout.load_bytes(codes) for one in layout.floats(four)]
    for i, pair in enumerate(zip(values[::2], values[1::2], strict=True)):
        both = _nearest(context, v, *pair)
        mixed = b.shuffle_vector(both, both, ir.Constant(ir.VectorType(I32, GROUP), mask))
        b.store(mixed, b.inttoptr(v.at(out, LINE_BYTES * i), _ROW.as_pointer())).align = 2


# Rows of bfloat16 as they lie in a full weight, `stride` bytes from one output to the next.
unpack_rows = intrinsic(_unpacking(_as_rows, 2 * GROUP))
# Operands: see tiles.multiply_tiles. For every two inputs 16 outputs, the second input in the upper half. No stride.
unpack_columns = intrinsic(_unpacking(_as_columns, 2 * GROUP * BLOCK))


def room_bytes(*blocks: tuple[int, int]) -> int:
    """Room for what `rows_of` unpacks at once, the largest of (outputs, count)."""
    return max(outputs * (2 * count + PAD_BYTES) for outputs, count in blocks)


@kernel
def row_stride(count, codes):
    """Bytes from one row of `rows_of` to the next."""
    return 2 * count + PAD_BYTES * (len(codes) > 0)


@kernel
def rows_of(weight, scales, first, outputs, count, room, codes):
    """Address of rows [first, first + outputs) of a weight as bfloat16 [.., count]: itself, or `room` for codes.

    Of codes, `first` and `outputs` are multiples of 16.
    """
    if len(codes) == 0:
        return weight + 2 * first * count
    code_step, scale_step, stride = row_bytes(count, codes, (0, 0)), scale_bytes(count, codes), row_stride(count, codes)
    for n in range(0, outputs, BLOCK):
        place, side = weight + (first + n) * code_step, scales + (first + n) * scale_step
        unpack_rows(place, side, count, room + n * stride, stride, codes)
    return room
