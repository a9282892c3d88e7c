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

from anaphora.runtime.kernels.vectors import I8, I32, I64, LINE_BYTES, Vectors, features, length

_POINTER = I8.as_pointer()
TILE_BYTES = 1024


def configuration() -> bytes:
    return bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8)


def _available(context: Any) -> bool:
    return "+amx-bf16" in features(context) and "+amx-tile" in features(context)


class Tiles:
    """Builds code for the tile unit. Tiles are numbered 0 to 7: 16 rows of 64 bytes each."""

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

    def load_once(self, tile: int, address: Any, stride: Any) -> None:
        """`load` of what is not read again soon, so that the nearest cache keeps other things."""
        self._call("tileloaddt164", [I8, _POINTER, I64], [ir.Constant(I8, tile), self._pointer(address), stride])

    def store(self, tile: int, address: Any, stride: Any) -> None:
        self._call("tilestored64", [I8, _POINTER, I64], [ir.Constant(I8, tile), self._pointer(address), stride])

    def multiply(self, total: int, a: int, b: int) -> None:
        self._call("tdpbf16ps", [I8] * 3, [ir.Constant(I8, tile) for tile in (total, a, b)])


@intrinsic
def has_tiles(tc):
    return types.boolean(), lambda context, builder, _, args: ir.Constant(ir.IntType(1), int(_available(context)))


def _configuring(name: str) -> Any:
    def typed(tc, address):
        def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
            if _available(context):
                Tiles(builder).configure(name, args[0])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return typed


load_configuration = intrinsic(_configuring("ldtilecfg"))
store_configuration = intrinsic(_configuring("sttilecfg"))


def transposed(v: Vectors, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 numbers, their rows and columns exchanged: four perfect shuffles."""
    low = ir.Constant(ir.VectorType(I32, 16), [i // 2 + 16 * (i % 2) for i in range(16)])
    high = ir.Constant(ir.VectorType(I32, 16), [8 + i // 2 + 16 * (i % 2) for i in range(16)])
    for _ in range(4):
        pairs = list(zip(rows[:8], rows[8:], strict=True))
        rows = [v.builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in (low, high)]
    return rows


def emit_tiles(context: Any, builder: Any, build: Any, arguments: Any) -> Any:
    """`build(vectors of bfloat16, tiles, arguments)`; nothing on a CPU without tiles."""
    if _available(context):
        build(Vectors(context, builder, 2), Tiles(builder), arguments)
    return context.get_dummy_value()


def _pack(v: Vectors, addresses: list[Any], count: Any, out: Any) -> None:
    """16 rows of `count` bfloat16: pairs of neighbours stay together, rows and pairs are exchanged."""
    b, kind = v.builder, ir.VectorType(I32, 16)
    with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (k, _):
        rows = [v.load(b.add(address, b.mul(k, v.number(2))), kind, 2) for address in addresses]
        place = b.add(out, b.mul(k, v.number(TILE_BYTES // 32)))
        for i, column in enumerate(transposed(v, rows)):
            b.store(column, b.inttoptr(v.at(place, 64 * i), kind.as_pointer())).align = 4


@intrinsic
def pack(tc, source, stride, count, out):
    """Pack 16 rows of `count` bfloat16 (a multiple of 32), `stride` bytes apart."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        source, stride, count, out = arguments
        addresses = [v.builder.add(source, v.builder.mul(stride, v.number(i))) for i in range(16)]
        _pack(v, addresses, count, out)

    return types.void(source, stride, count, out), lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def pack_rows(tc, source, rows, count, out):
    """Pack 16 rows of `count` bfloat16 (a multiple of 32) that lie at `source + rows[i]`."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        source, rows, count, out = arguments
        _pack(v, [v.builder.add(source, v.load(v.at(rows, 8 * t), I64, 8)) for t in range(16)], count, out)

    return types.void(source, rows, count, out), lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


def _accumulate(
    v: Vectors, tiles: Tiles, rows: tuple[Any, ...], packed: tuple[Any, ...], count: Any, ahead: Any = None
) -> None:
    """Tiles 0 to 3: products of 16 × as many rows and packed columns, over `count` numbers.

    rows: address, stride, how many times 16. packed: address, bytes from 16 columns to the next, how many times 16.
    ahead: address of the rows that come next, all of one piece, which are asked for meanwhile.
    """
    b, (left, stride, num_left), (right, block, num_right) = v.builder, rows, packed
    for total in range(num_left * num_right):
        tiles.zero(total)
    with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (k, _):
        if ahead is not None:
            next_lines = b.add(ahead, b.mul(k, v.number(2 * 16 * num_left)))
            for line in range(16 * num_left):
                v.fetch(v.at(next_lines, LINE_BYTES * line))
        for j in range(num_left):
            tiles.load(4 + j, b.add(b.add(left, b.mul(k, v.number(2))), b.mul(stride, v.number(16 * j))), stride)
        for i in range(num_right):
            begin = b.add(b.add(right, b.mul(k, v.number(TILE_BYTES // 32))), b.mul(block, v.number(i)))
            tiles.load(6 + i, begin, v.number(64))
        for j in range(num_left):
            for i in range(num_right):
                tiles.multiply(j * num_right + i, 4 + j, 6 + i)


@intrinsic
def multiply_tiles(tc, rows, stride, packed, block, count, out, out_stride, num_rows, num_columns):
    """out[row, column] = sum over `count` (a multiple of 32) of row × column, float32.

    rows: 16 × len(num_rows) rows of bfloat16. packed: 16 × len(num_columns) columns, `block` bytes from 16 to the next.
    Both lengths are 1 or 2. Strides in bytes.
    """
    num_left, num_right = length(num_rows), length(num_columns)

    def build(v: Vectors, tiles: Tiles, arguments: Any) -> None:
        rows, stride, packed, block, count, out, out_stride = arguments[:7]
        _accumulate(v, tiles, (rows, stride, num_left), (packed, block, num_right), count)
        for j in range(num_left):
            line = v.builder.add(out, v.builder.mul(out_stride, v.number(16 * j)))
            for i in range(num_right):
                tiles.store(j * num_right + i, v.at(line, 64 * i), out_stride)

    signature = types.void(rows, stride, packed, block, count, out, out_stride, num_rows, num_columns)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def multiply_tiles_transposed(tc, rows, stride, packed, count, out, out_stride, scratch, ahead, num_rows, num_columns):
    """out[column, row] of the same products, columns packed one after another.

    scratch: address of 1024 bytes. ahead: address of the rows that come next, which lie without gaps.
    """
    num_left, num_right = length(num_rows), length(num_columns)

    def build(v: Vectors, tiles: Tiles, arguments: Any) -> None:
        rows, stride, packed, count, out, out_stride, scratch, ahead = arguments[:8]
        b = v.builder
        block = b.mul(count, v.number(TILE_BYTES // 32))
        _accumulate(v, tiles, (rows, stride, num_left), (packed, block, num_right), count, ahead)
        for j in range(num_left):
            for i in range(num_right):
                tiles.store(j * num_right + i, scratch, v.number(64))
                lines = transposed(v, [v.load_floats(v.at(scratch, 64 * n)) for n in range(16)])
                for number, line in enumerate(lines):
                    place = b.add(out, b.mul(out_stride, v.number(16 * i + number)))
                    v.store_floats(line, v.at(place, 64 * j))

    signature = types.void(rows, stride, packed, count, out, out_stride, scratch, ahead, num_rows, num_columns)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)
