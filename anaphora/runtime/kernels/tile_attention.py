"""One chunk's keys for many queries of one K/V head, by the tile unit (bfloat16).

Knows addresses, rows and tiles; knows nothing of blocks and requests. A score's row is a key and its lane a query, 16
of which are a panel, so the softmax needs no sums across lanes. Keys are read where they lie; values are brought
together once for all panels, each with its partner 16 keys on, as the tile unit adds up pairs:

    scores   [keys, 16 queries] float32          keys × queries
    weights  [16 queries, keys] bfloat16         in pairs: 0, 16, 1, 17, ...
    values   [keys / 32, sums of 16, 16 pairs, 16 numbers, 2]

What a lane holds does not depend on the other lanes, nor on keys that it does not see: they weigh exactly 0.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.attention import CHUNK_TOKENS
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.exponentials import soft_cap
from anaphora.runtime.kernels.tile_softmax import BLOCK, fetch_rows, soften_panel
from anaphora.runtime.kernels.tiles import TILE_BYTES, Tiles, emit_tiles, pack_rows
from anaphora.runtime.kernels.vectors import (
    I16,
    I32,
    I64,
    Vectors,
    address_of,
    length,
    load_element,
)

_PANEL = 16


def tile_bytes(head_dim: int) -> int:
    """What `attend_head_by_tiles` needs: values, copied keys, scores, weights, results, queries, and small tables."""
    tables = 16 * CHUNK_TOKENS // _PANEL + 8 * _PANEL + 4 * 4 * _PANEL
    return 2 * CHUNK_TOKENS * 2 * head_dim + 16 * 6 * CHUNK_TOKENS + 16 * 6 * head_dim + tables


@intrinsic
def store_integer(tc, address, value, size):
    """An int64 there, in as many bytes as `size` is long."""
    kind = ir.IntType(8 * length(size))

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[1], kind), builder.inttoptr(args[0], kind.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, size), generate


@intrinsic
def find_keys(tc, keys, rows, row_bytes, dim, count, copied, table):
    """table[t]: address and stride of the 16 keys from 16 t on, for `count` (a multiple of 16) keys.

    Where they do not lie row_bytes apart, they are copied to `copied`, `dim` bfloat16 each.
    """

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        keys, rows, row_bytes, dim, count, copied, table = arguments
        b, wide, pointer = v.builder, ir.VectorType(I32, 16), I64.as_pointer()
        narrow = ir.VectorType(I64, 8)
        undefined = ir.Constant(narrow, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(I32, 8), [0] * 8)

        def splat(number: Any) -> Any:
            return b.shuffle_vector(b.insert_element(undefined, number, ir.Constant(I32, 0)), undefined, zeros)

        steps = splat(row_bytes)
        offsets = [b.mul(steps, ir.Constant(narrow, list(range(i, i + 8)))) for i in (0, 8)]
        with cgutils.for_range_slice(b, v.number(0), count, v.number(_PANEL), I64) as (t, _):
            place = b.add(rows, b.mul(t, v.number(8)))
            first = v.load(place, I64, 8)
            differ = [b.sub(b.sub(v.load(v.at(place, 64 * i), narrow, 8), splat(first)), offsets[i]) for i in range(2)]
            strange = b.bitcast(b.icmp_signed("!=", b.or_(*differ), ir.Constant(narrow, [0] * 8)), ir.IntType(8))
            entry = b.add(table, t)  # of 16 bytes
            with b.if_else(b.icmp_signed("==", strange, ir.Constant(ir.IntType(8), 0))) as (in_order, scattered):
                with in_order:
                    b.store(b.add(keys, first), b.inttoptr(entry, pointer))
                    b.store(row_bytes, b.inttoptr(v.at(entry, 8), pointer))
                with scattered:
                    bytes_each = b.mul(dim, v.number(2))
                    to = b.add(copied, b.mul(t, bytes_each))
                    for i in range(_PANEL):
                        source = b.add(keys, v.load(v.at(place, 8 * i), I64, 8))
                        target = b.add(to, b.mul(bytes_each, v.number(i)))
                        with cgutils.for_range_slice(b, v.number(0), bytes_each, v.number(64), I64) as (n, _):
                            line = v.load(b.add(source, n), wide, 2)
                            b.store(line, b.inttoptr(b.add(target, n), wide.as_pointer())).align = 2
                    b.store(to, b.inttoptr(entry, pointer))
                    b.store(bytes_each, b.inttoptr(v.at(entry, 8), pointer))

    signature = types.void(keys, rows, row_bytes, dim, count, copied, table)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def join_values(tc, values, rows, out, next_values, next_rows, head_dim):
    """Values of 32 tokens at `values + rows[t]`: for every 32 numbers two tiles, one after another.

    A tile's row is a pair of tokens, i and i + 16. The first tile has numbers 0 to 3 of each 8, the second 4 to 7.
    next_values, next_rows: of those that are asked for meanwhile.
    """
    dim = 16 * length(head_dim)

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        values, rows, out, next_values, next_rows = arguments[:5]
        b, narrow = v.builder, ir.VectorType(I16, 32)
        masks = []
        for half in (0, 4):
            order = []
            for lane in range(0, 32, 8):
                for n in range(4):
                    order += [lane + half + n, 32 + lane + half + n]
            masks.append(ir.Constant(ir.VectorType(I32, 32), order))
        with cgutils.for_range_slice(b, v.number(0), v.number(16), v.number(1), I64) as (i, _):
            place = b.add(rows, b.mul(i, v.number(8)))
            pair = [b.add(values, v.load(v.at(place, 8 * 16 * k), I64, 8)) for k in range(2)]
            target = b.add(out, b.mul(i, v.number(64)))
            fetch_rows(v, next_values, b.add(next_rows, b.mul(i, v.number(8))), (0, 16), 2 * dim)
            for n in range(0, dim, 32):
                first, second = (v.load(v.at(row, 2 * n), narrow, 2) for row in pair)
                for k, mask in enumerate(masks):
                    at = v.at(target, TILE_BYTES * (n // 16 + k))
                    b.store(b.shuffle_vector(first, second, mask), b.inttoptr(at, narrow.as_pointer())).align = 4

    signature = types.void(values, rows, out, next_values, next_rows, head_dim)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def score_panel(tc, table, operand, count, out, num_tiles):
    """Products of len(num_tiles) × 16 keys with a panel's operand of `count` (a multiple of 32) numbers, float32.

    table: what `find_keys` made of these keys.
    """
    num = length(num_tiles)

    def build(v: Vectors, tiles: Tiles, arguments: Any) -> None:
        table, operand, count, out = arguments[:4]
        b = v.builder
        places = [[v.load(v.at(table, 16 * t + 8 * i), I64, 8) for i in range(2)] for t in range(num)]
        for t in range(num):
            tiles.zero(t)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (k, _):
            tiles.load(4, b.add(operand, b.mul(k, v.number(TILE_BYTES // 32))), v.number(64))
            for t, (address, stride) in enumerate(places):
                tiles.load(5 + t % 3, b.add(address, b.mul(k, v.number(2))), stride)
                tiles.multiply(t, 5 + t % 3, 4)
        for t in range(num):
            tiles.store(t, v.at(out, TILE_BYTES * t), v.number(64))

    signature = types.void(table, operand, count, out, num_tiles)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def weigh_panel(tc, weights, stride, values, value_bytes, begin, end, out, out_stride, num_tiles):
    """out [16, 16 × len(num_tiles)]: weights × joined values of the blocks [begin, end); value_bytes: of a block."""
    num = length(num_tiles)

    def build(v: Vectors, tiles: Tiles, arguments: Any) -> None:
        weights, stride, values, value_bytes, begin, end, out, out_stride = arguments[:8]
        b = v.builder
        for t in range(num):
            tiles.zero(t)
        with cgutils.for_range_slice(b, begin, end, v.number(1), I64) as (block, _):
            tiles.load(4, b.add(weights, b.mul(block, v.number(2 * BLOCK))), stride)
            place = b.add(values, b.mul(block, value_bytes))
            for t in range(num):
                tiles.load(5 + t % 3, v.at(place, TILE_BYTES * t), v.number(64))
                tiles.multiply(t, 4, 5 + t % 3)
        for t in range(num):
            tiles.store(t, v.at(out, 64 * t), out_stride)

    signature = types.void(weights, stride, values, value_bytes, begin, end, out, out_stride, num_tiles)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def order_numbers(tc, source, out, head_dim):
    """One lane of what `weigh_panel` gives, in the numbers' own order; see `join_values`."""
    dim = 16 * length(head_dim)

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        source, out = arguments[:2]
        for n in range(0, dim, 32):
            low, high = (v.load_floats(v.at(source, 4 * n + 64 * i)) for i in range(2))
            for half in range(2):
                order: list[int] = []
                for quarter in (2 * half, 2 * half + 1):
                    order += [*range(4 * quarter, 4 * quarter + 4), *range(16 + 4 * quarter, 20 + 4 * quarter)]
                mask = ir.Constant(ir.VectorType(I32, 16), order)
                v.store_floats(v.builder.shuffle_vector(low, high, mask), v.at(out, 4 * n + 64 * half))

    signature = types.void(source, out, head_dim)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@kernel
def attend_head_by_tiles(
    queries, keys, values, rows, tokens, first, visible, slots, kv_head, next_rows, next_head, num_heads, num_kv_heads,
    scale, cap, room, tops, sums, partials, head_dim,
):  # fmt: skip
    """attention.attend_chunk for the query heads of one K/V head. queries: address of elements; room: of `tile_bytes`.

    Rows of keys and values are read up to a multiple of 32, and from one on. next_rows, next_head: the chunk and K/V
    head whose turn is next, which come from memory meanwhile.
    """
    dim = 16 * len(head_dim)
    group = num_heads // num_kv_heads
    row_bytes, offset, next_offset = num_kv_heads * 2 * dim, kv_head * 2 * dim, next_head * 2 * dim
    packed_values = room
    copied = packed_values + CHUNK_TOKENS * 2 * dim
    scores = copied + CHUNK_TOKENS * 2 * dim
    weights = scores + 64 * CHUNK_TOKENS
    results = weights + 32 * CHUNK_TOKENS
    operand = results + 64 * dim
    lane_first = operand + 32 * dim
    lane_visible, lane_tops, lane_sums = lane_first + 64, lane_first + 128, lane_first + 192
    sources = lane_first + 256
    table = sources + 128
    seen_from, seen_to = CHUNK_TOKENS, 0
    for j in range(len(tokens)):
        seen_from, seen_to = min(seen_from, first[j]), max(seen_to, visible[j])
    begin, end = seen_from // 32, (seen_to + 31) // 32
    find_keys(
        keys + offset, rows + 8 * 32 * begin, row_bytes, dim, 32 * (end - begin), copied + 2 * dim * 32 * begin,
        table + 32 * begin,
    )  # fmt: skip
    for block in range(begin, end):
        join_values(
            values + offset, rows + 8 * 32 * block, packed_values + block * 64 * dim, values + next_offset,
            next_rows + 8 * 32 * block, head_dim,
        )  # fmt: skip
    num_rows = len(tokens) * group
    for panel in range(0, num_rows, 16):
        whole_begin, whole_end = 0, CHUNK_TOKENS
        for i in range(16):
            row = min(panel + i, num_rows - 1)
            j, head = row // group, kv_head * group + row % group
            store_integer(sources + 8 * i, (tokens[j] * num_heads + head) * 2 * dim, (0, 0, 0, 0, 0, 0, 0, 0))
            store_integer(lane_first + 4 * i, first[j], (0, 0, 0, 0))
            store_integer(lane_visible + 4 * i, visible[j], (0, 0, 0, 0))
            whole_begin, whole_end = max(whole_begin, first[j]), min(whole_end, visible[j])
        whole_begin = (whole_begin + 31) // 32
        whole_end = max(whole_begin, whole_end // 32)
        pack_rows(queries, sources, dim, operand)
        for t in range(2 * begin, 2 * end, 2):
            score_panel(table + 16 * t, operand, dim, scores + TILE_BYTES * t, (0, 0))
        if cap != 0:
            soft_cap(scores + 64 * 32 * begin, 16 * 32 * (end - begin), scale / cap, cap / scale)
        soften_panel(
            scores, begin, min(whole_begin, end), min(whole_end, end), end, lane_first, lane_visible, scale, weights,
            2 * CHUNK_TOKENS, lane_tops, lane_sums, keys + next_offset, next_rows, head_dim,
        )  # fmt: skip
        next_rows, next_offset = rows, offset  # asked for already
        for d in range(0, dim // 16, 2):
            weigh_panel(
                weights, 2 * CHUNK_TOKENS, packed_values + TILE_BYTES * d, 64 * dim, begin, end, results + 64 * d,
                4 * dim, (0, 0),
            )  # fmt: skip
        for i in range(min(16, num_rows - panel)):
            j, head = (panel + i) // group, kv_head * group + (panel + i) % group
            tops[slots[j], head] = load_element(lane_tops, i, (0, 0, 0, 0))
            sums[slots[j], head] = load_element(lane_sums, i, (0, 0, 0, 0))
            order_numbers(results + 4 * dim * i, address_of(partials[slots[j], head]), head_dim)
