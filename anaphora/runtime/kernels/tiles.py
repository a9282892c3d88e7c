"""Matrix products by the CPU's tile unit (Intel AMX, bfloat16): 16 weight rows × 16 tokens in one instruction.

Knows LLVM's tile instructions and the layouts that they want; knows nothing of models. The weight is read as it lies in
memory, [out, in]; the tokens, of which there are few, are packed, 16 together:

    packed [blocks of 16 tokens, count / 32, 16 pairs, 16 tokens, 2]

A CPU without tiles compiles every function here to nothing, and `has_tiles` to False.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.vectors import F32, I8, I32, I64, Vectors, features, length, void

_POINTER = I8.as_pointer()
TILE_BYTES = 1024

CONFIG_BYTES = 64
"""Of a tile configuration: every tile is 16 rows of 64 bytes."""


def configuration() -> bytes:
    return bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8)


def _available(context: Any) -> bool:
    return "+amx-bf16" in features(context) and "+amx-tile" in features(context)


class _Tiles:
    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def _call(self, name: str, kinds: list[Any], arguments: list[Any]) -> None:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(ir.VoidType(), kinds), f"llvm.x86.{name}"
        )
        self.builder.call(function, arguments)

    def _pointer(self, address: Any) -> Any:
        return self.builder.inttoptr(address, _POINTER)

    def configure(self, name: str, address: Any) -> None:
        self._call(name, [_POINTER], [self._pointer(address)])

    def zero(self, tile: int) -> None:
        self._call("tilezero", [I8], [ir.Constant(I8, tile)])

    def load(self, tile: int, address: Any, stride: Any) -> None:
        self._call("tileloadd64", [I8, _POINTER, I64], [ir.Constant(I8, tile), self._pointer(address), stride])

    def store(self, tile: int, address: Any, stride: Any) -> None:
        self._call("tilestored64", [I8, _POINTER, I64], [ir.Constant(I8, tile), self._pointer(address), stride])

    def multiply(self, total: int, a: int, b: int) -> None:
        self._call("tdpbf16ps", [I8] * 3, [ir.Constant(I8, tile) for tile in (total, a, b)])


@intrinsic
def has_tiles(tc):  # type: ignore[no-untyped-def]
    return types.boolean(), lambda context, builder, _, args: ir.Constant(ir.IntType(1), int(_available(context)))


def _configuring(name: str) -> Any:
    def typed(tc, address):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
            if _available(context):
                _Tiles(builder).configure(name, args[0])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return typed


load_configuration = intrinsic(_configuring("ldtilecfg"))
store_configuration = intrinsic(_configuring("sttilecfg"))


def transposed(v: Vectors, rows: list[Any], kind: Any) -> list[Any]:
    """16 vectors of 16 numbers, their rows and columns exchanged: four perfect shuffles."""
    low = ir.Constant(ir.VectorType(I32, 16), [i // 2 + 16 * (i % 2) for i in range(16)])
    high = ir.Constant(ir.VectorType(I32, 16), [8 + i // 2 + 16 * (i % 2) for i in range(16)])
    for _ in range(4):
        pairs = list(zip(rows[:8], rows[8:], strict=True))
        rows = [v.builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in (low, high)]
    return rows


@intrinsic
def pack(tc, source, stride, count, out):  # type: ignore[no-untyped-def]
    """Pack 16 rows of `count` bfloat16 (a multiple of 32), `stride` bytes apart."""

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        source, stride, count, out = arguments
        b, kind = v.builder, ir.VectorType(I32, 16)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (k, _):
            begin = b.add(source, b.mul(k, v.number(2)))
            rows = [v.load(b.add(begin, b.mul(stride, v.number(i))), kind, 2) for i in range(16)]
            place = b.add(out, b.mul(k, v.number(TILE_BYTES // 32)))
            for i, column in enumerate(transposed(v, rows, kind)):
                b.store(column, b.inttoptr(v.at(place, 64 * i), kind.as_pointer())).align = 4

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        if _available(context):
            build(Vectors(context, builder, 2), arguments, ())
        return context.get_dummy_value()

    return types.void(source, stride, count, out), generate


@intrinsic
def multiply_tiles(tc, packed, weight, w_stride, count, out, out_stride, scratch, num_w, num_x):  # type: ignore[no-untyped-def]
    """out[i, j] = token i · weight row j, float32: 16 × len(num_w) weight rows, 16 × len(num_x) tokens.

    len(num_w), len(num_x): 1 or 2. scratch: address of 1024 bytes. Strides in bytes.
    """
    ws, xs = length(num_w), length(num_x)

    def build(v: Vectors, arguments: Any) -> None:
        packed, weight, w_stride, count, out, out_stride, scratch = arguments[:7]
        b, tiles = v.builder, _Tiles(v.builder)
        block = b.mul(count, v.number(TILE_BYTES // 32))  # bytes of 16 packed tokens
        for total in range(ws * xs):
            tiles.zero(total)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (k, _):
            for j in range(ws):
                begin = b.add(b.add(weight, b.mul(k, v.number(2))), b.mul(w_stride, v.number(16 * j)))
                tiles.load(4 + j, begin, w_stride)
            for i in range(xs):
                begin = b.add(b.add(packed, b.mul(k, v.number(TILE_BYTES // 32))), b.mul(block, v.number(i)))
                tiles.load(6 + i, begin, v.number(64))
            for j in range(ws):
                for i in range(xs):
                    tiles.multiply(j * xs + i, 4 + j, 6 + i)
        for j in range(ws):
            for i in range(xs):
                tiles.store(j * xs + i, scratch, v.number(64))
                columns = [v.load_floats(v.at(scratch, 64 * n)) for n in range(16)]
                for token, row in enumerate(transposed(v, columns, F32)):
                    place = b.add(out, b.mul(out_stride, v.number(16 * i + token)))
                    v.store_floats(row, v.at(place, 64 * j))

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        if _available(context):
            build(Vectors(context, builder, 2), arguments)
        return context.get_dummy_value()

    signature = types.void(packed, weight, w_stride, count, out, out_stride, scratch, num_w, num_x)
    return signature, generate
