"""Attention of many new tokens by the tile unit, in panels: scores, softmax and weighted values of 16 tokens at a time.

Knows addresses, rows and panels; knows nothing of blocks and requests. Keys and values of CHUNK_TOKENS tokens of a
sequence are brought together once for each K/V head, then every panel of the thread reads them. A score's row is a
key and its lane a token, so the softmax needs no sums across lanes. The largest score so far, the sum of exponentials
and the values that they weigh go along from chunk to chunk. Borders are multiples of CHUNK_TOKENS, whoever computes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.panels import pair, store_pairs
from anaphora.runtime.kernels.tiles import TILE_BYTES, Tiles, emit_tiles, transposed
from anaphora.runtime.kernels.vectors import F32, I32, I64, Vectors, length

CHUNK_TOKENS = 256

LOWEST = -1e30
"""The largest score before there is one: finite, so that a difference of two is a number."""

STATE_BYTES = 3 * 64
"""Of one head of a panel: largest score, sum of exponentials, what the last chunk made of earlier ones."""

# 2 ** f for |f| <= 1/2, highest power first: relative error 3e-6, as weights are rounded to bfloat16.
_COEFFICIENTS = (9.56051e-3, 5.591704e-2, 2.4024981e-1, 6.9312197e-1, 9.9999919e-1)
_LOG2_E = 1.4426950408889634

PANEL, LEAST, MOST = range(3)
"""Columns of `items`: a panel, and the least and most keys of the sequence that one of its 16 tokens sees."""


def chunk_bytes(head_dim: int) -> int:
    """Room for a chunk: keys, values, scores, weights, how many keys each token sees."""
    return 2 * CHUNK_TOKENS * 2 * head_dim + CHUNK_TOKENS * (64 + 32) + 64


def result_bytes(head_dim: int) -> int:
    """Room for one head of an item of a thread."""
    return 64 * head_dim + STATE_BYTES


def _power_of_two(v: Vectors, y: Any) -> Any:
    """2 ** y; NaN of NaN."""
    b, mask = v.builder, ir.IntType(16)
    whole = v.each("rint", y)
    f = b.fsub(y, whole)
    result = v.constant(_COEFFICIENTS[0])
    for factor in _COEFFICIENTS[1:]:
        result = v.fma(result, f, v.constant(factor))
    kinds = [v.type, v.type, v.type, mask, I32]
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(v.type, kinds), "llvm.x86.avx512.mask.scalef.ps.512"
    )
    current_rounding = 4
    return b.call(function, [result, whole, v.zero, ir.Constant(mask, -1), ir.Constant(I32, current_rounding)])


def _splat(v: Vectors, number: Any) -> Any:
    """An int64 in every lane, as int32."""
    b = v.builder
    return b.bitcast(v.splat(b.bitcast(b.trunc(number, I32), F32)), ir.VectorType(I32, 16))


@intrinsic
def load_row(tc, address):
    """The int64 there."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], I64.as_pointer()), typ=I64)

    return types.int64(types.int64), generate


@intrinsic
def copy_row(tc, source, out, count):
    """`count` (a multiple of 32) bfloat16."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        source, out, count = arguments
        b, kind = v.builder, ir.VectorType(I32, 16)
        with cgutils.for_range_slice(b, v.number(0), b.mul(count, v.number(2)), v.number(64), I64) as (n, _):
            b.store(v.load(b.add(source, n), kind, 2), b.inttoptr(b.add(out, n), kind.as_pointer())).align = 2

    signature = types.void(source, out, count)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def turn_values(tc, values, rows, out, out_bytes, dim):
    """Values of 32 tokens at `values + rows[t]`: for every 16 numbers of a value a tile, out_bytes apart.

    A tile's row is a number, and the tokens stand in it as 0, 16, 1, 17...
    """

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        values, rows, out, out_bytes, dim = arguments
        b, wide = v.builder, ir.VectorType(I32, 16)
        sixteen, upper = ir.Constant(wide, [16] * 16), ir.Constant(wide, [-65536] * 16)
        lower = ir.Constant(wide, [65535] * 16)
        places = [b.add(values, v.load(v.at(rows, 8 * t), I64, 8)) for t in range(32)]
        with cgutils.for_range_slice(b, v.number(0), dim, v.number(32), I64) as (n, _):
            column, target = b.mul(n, v.number(2)), b.add(out, b.mul(out_bytes, b.lshr(n, v.number(4))))
            halves = []
            for first in (0, 16):
                lines = [v.load(b.add(place, column), wide, 2) for place in places[first : first + 16]]
                halves.append(transposed(v, lines))
            # A line has two numbers of 16 tokens: it is cut up, and joined with those of the other 16.
            for line, (low, high) in enumerate(zip(*halves, strict=True)):
                tile = b.add(target, out_bytes) if line >= 8 else target
                even = b.or_(b.and_(low, lower), b.shl(high, sixteen))
                odd = b.or_(b.lshr(low, sixteen), b.and_(high, upper))
                for i, both in enumerate((even, odd)):
                    store_pairs(v, both, v.at(tile, 64 * (2 * (line % 8) + i)))

    signature = types.void(values, rows, out, out_bytes, dim)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def accumulate(tc, rows, tile_bytes, stride, step_bytes, operand, count, out, num_tiles, keep):
    """Sums of len(num_tiles) × 16 rows with a panel's operand of `count` (a multiple of 32) numbers, float32.

    rows: tile_bytes from 16 to the next 16, `stride` from one to the next, step_bytes from 32 numbers to the next.
    keep: of length 2, to add to what `out` holds; of length 1, to overwrite it.
    """
    num, adds = length(num_tiles), length(keep) == 2

    def build(v: Vectors, tiles: Tiles, arguments: Any) -> None:
        rows, tile_bytes, stride, step_bytes, operand, count, out = arguments[:7]
        b = v.builder
        for t in range(num):
            if adds:
                tiles.load(t, v.at(out, TILE_BYTES * t), v.number(64))
            else:
                tiles.zero(t)
        begins = [b.add(rows, b.mul(tile_bytes, v.number(t))) for t in range(num)]
        with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (k, _):
            step = b.lshr(k, v.number(5))
            tiles.load(4, b.add(operand, b.mul(step, v.number(TILE_BYTES))), v.number(64))
            offset = b.mul(step, step_bytes)
            for t in range(num):
                tiles.load(5 + t % 3, b.add(begins[t], offset), stride)
                tiles.multiply(t, 5 + t % 3, 4)
        for t in range(num):
            tiles.store(t, v.at(out, TILE_BYTES * t), v.number(64))

    signature = types.void(rows, tile_bytes, stride, step_bytes, operand, count, out, num_tiles, keep)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def soften(tc, scores, whole, blocks, visible, scale, state, weights):
    """Softmax of one more chunk of scores [keys, 16]: weights as an operand whose pairs are the keys i and i + 16.

    blocks: of 32 keys; every token sees all keys of the first `whole` of them. visible: int32 [16].
    """

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        scores, whole, blocks, visible, scale, state, weights = arguments
        b, wide = v.builder, ir.VectorType(I32, 16)
        seen = v.load(visible, wide, 4)
        lowest = v.constant(LOWEST)
        before = v.load_floats(state)
        best = cgutils.alloca_once_value(b, before)
        total = cgutils.alloca_once_value(b, v.zero)

        def sees(key: Any) -> Any:
            return b.icmp_signed("<", _splat(v, key), seen)

        def greatest(block: Any, masked: bool) -> None:
            place = b.add(scores, b.mul(block, v.number(32 * 64)))
            found = b.load(best)
            for i in range(32):
                value = v.load_floats(v.at(place, 64 * i))
                if masked:
                    value = b.select(sees(v.at(b.mul(block, v.number(32)), i)), value, lowest)
                found = b.select(b.fcmp_ordered(">", value, found), value, found)
            b.store(found, best)

        for begin, end, masked in ((v.number(0), whole, False), (whole, blocks, True)):
            with cgutils.for_range_slice(b, begin, end, v.number(1), I64) as (block, _):
                greatest(block, masked)
        top, factor = b.load(best), v.splat(b.fmul(scale, ir.Constant(F32, _LOG2_E)))
        shift = b.fneg(b.fmul(top, factor))
        kept = _power_of_two(v, b.fmul(b.fsub(before, top), factor))

        def weigh(block: Any, masked: bool) -> None:
            place, target = b.add(scores, b.mul(block, v.number(32 * 64))), b.add(weights, b.mul(block, v.number(1024)))
            added = b.load(total)
            for i in range(16):
                both = []
                for key in (i, i + 16):
                    value = _power_of_two(v, v.fma(v.load_floats(v.at(place, 64 * key)), factor, shift))
                    if masked:
                        value = b.select(sees(v.at(b.mul(block, v.number(32)), key)), value, v.zero)
                    both.append(value)
                added = b.fadd(added, b.fadd(*both))
                # Half up is near enough, and no NaN is lost, as the sum has it.
                low, high = (b.add(b.bitcast(value, wide), ir.Constant(wide, [0x8000] * 16)) for value in both)
                low = b.lshr(low, ir.Constant(wide, [16] * 16))
                pairs = b.or_(low, b.and_(high, ir.Constant(wide, [-65536] * 16)))
                store_pairs(v, pairs, v.at(target, 64 * i))
            b.store(added, total)

        for begin, end, masked in ((v.number(0), whole, False), (whole, blocks, True)):
            with cgutils.for_range_slice(b, begin, end, v.number(1), I64) as (block, _):
                weigh(block, masked)
        v.store_floats(top, state)
        v.store_floats(v.fma(v.load_floats(v.at(state, 64)), kept, b.load(total)), v.at(state, 64))
        v.store_floats(kept, v.at(state, 128))

    signature = types.void(scores, whole, blocks, visible, scale, state, weights)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def begin_panel(tc, panel, count, state):
    """No values yet, and no score."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, count, state = arguments
        b = v.builder
        with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
            v.store_floats(v.zero, b.add(panel, b.mul(n, v.number(64))))
        v.store_floats(v.constant(LOWEST), state)
        v.store_floats(v.zero, v.at(state, 64))

    signature = types.void(panel, count, state)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def rescale_panel(tc, panel, count, factors):
    """panel [count, 16] *= factors [16]."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, count, factors = arguments
        b, factor = v.builder, v.load_floats(factors)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
            place = b.add(panel, b.mul(n, v.number(64)))
            v.store_floats(b.fmul(v.load_floats(place), factor), place)

    signature = types.void(panel, count, factors)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def finish_panel(tc, panel, count, state, out):
    """Weighted values over their sums as an operand; lanes without any keep what `out` holds."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, count, state, out = arguments
        b, total, kind = v.builder, v.load_floats(v.at(state, 64)), ir.VectorType(I32, 16)
        nothing = b.fcmp_ordered("==", total, v.zero)
        factor = b.fdiv(v.constant(1.0), total)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(2), I64) as (n, _):
            place, target = b.add(panel, b.mul(n, v.number(64))), b.add(out, b.mul(n, v.number(32)))
            pairs = pair(v, *(b.fmul(v.load_floats(v.at(place, 64 * i)), factor) for i in range(2)))
            store_pairs(v, b.select(nothing, v.load(target, kind, 4), pairs), target)

    signature = types.void(panel, count, state, out)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def see_less(tc, visible, count, out):
    """out [16] = visible [16] - count, int32."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        visible, count, out = arguments
        b, wide = v.builder, ir.VectorType(I32, 16)
        store_pairs(v, b.sub(v.load(visible, wide, 4), _splat(v, count)), out)

    signature = types.void(visible, count, out)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@kernel
def attend_panels(
    queries, keys, values, rows, num_keys, items, visible, kv_head, num_heads, num_kv_heads, scale, room, results,
    dim,
):  # fmt: skip
    """Attention of one sequence's items, for the query heads of one K/V head.

    An item is a panel, some of whose tokens are of the sequence.

    queries: address of operands [panels, num_heads, dim]; each is replaced by its result.
    rows: address of the byte offsets of the sequence's keys, readable up to a multiple of CHUNK_TOKENS. num_keys: that
    are seen by any. items: int64 [n, 3]. visible: address of int32 [n, 16], 0 for tokens of others.
    room, results: addresses of `chunk_bytes`, and of `result_bytes` for every item and head of a group.
    """
    group = num_heads // num_kv_heads
    packed_values = room + CHUNK_TOKENS * 2 * dim
    scores = packed_values + CHUNK_TOKENS * 2 * dim
    weights = scores + CHUNK_TOKENS * 64
    seen = weights + CHUNK_TOKENS * 32
    tile_row, value_bytes = 16 * 2 * dim, CHUNK_TOKENS // 32 * TILE_BYTES
    own = 64 * dim + STATE_BYTES
    offset = kv_head * dim * 2
    for n in range(len(items) * group):
        begin_panel(results + n * own, dim, results + n * own + 64 * dim)
    for start in range(0, num_keys, CHUNK_TOKENS):
        here = min(CHUNK_TOKENS, num_keys - start)
        row = rows + 8 * start
        place = row
        for t in range((here + 63) // 64 * 64):
            copy_row(keys + offset + load_row(place), room + t * 2 * dim, dim)
            place += 8
        for t in range((here + 31) // 32):
            turn_values(values + offset, row + 8 * 32 * t, packed_values + t * TILE_BYTES, value_bytes, dim)
        for n in range(len(items)):
            count = min(items[n, MOST] - start, CHUNK_TOKENS)
            if count <= 0:
                continue
            whole = max(0, min(items[n, LEAST] - start, CHUNK_TOKENS)) // 32
            blocks = (count + 31) // 32
            see_less(visible + 64 * n, start, seen)
            for g in range(group):
                head = kv_head * group + g
                query = queries + (items[n, PANEL] * num_heads + head) * dim * 32
                panel = results + (n * group + g) * own
                state = panel + 64 * dim
                for t in range(0, count, 64):
                    accumulate(
                        room + t * 2 * dim, tile_row, 2 * dim, 64, query, dim, scores + 64 * t, (0, 0, 0, 0), (0,)
                    )
                soften(scores, whole, blocks, seen, scale, state, weights)
                rescale_panel(panel, dim, state + 128)
                d = 0
                while d < dim // 16:
                    tile, target = packed_values + d * value_bytes, panel + d * TILE_BYTES
                    if d + 4 <= dim // 16:
                        accumulate(
                            tile, value_bytes, 64, TILE_BYTES, weights, 32 * blocks, target, (0, 0, 0, 0), (0, 0)
                        )
                    else:
                        accumulate(tile, value_bytes, 64, TILE_BYTES, weights, 32 * blocks, target, (0, 0), (0, 0))
                    d += 4
    for n in range(len(items)):
        for g in range(group):
            panel = results + (n * group + g) * own
            query = queries + (items[n, PANEL] * num_heads + kv_head * group + g) * dim * 32
            finish_panel(panel, dim, panel + 64 * dim, query)
