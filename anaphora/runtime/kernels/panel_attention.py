"""Attention of many new tokens by the tile unit, in panels: scores, softmax and weighted values of 16 tokens at a time.

Knows addresses, rows and panels; knows nothing of blocks and requests. Values of CHUNK_TOKENS tokens of a sequence are
brought together once for each K/V head, then every panel of the unit reads them; keys are read where they lie. A
score's row is a key and its lane a token, so the softmax needs no sums across lanes. Within a span of SPAN_TOKENS keys
the largest score so far, the sum of exponentials and the values that they weigh go along from chunk to chunk; then
spans are merged, first to last. Borders are multiples of these, so who computes a span changes no bit. Keys that no
token of a panel sees, ahead of it or left behind by its window, cost it nothing but the rest of a block of 32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.exponentials import soft_cap
from anaphora.runtime.kernels.panel_softmax import (
    STATE_BYTES,
    add_sink,
    begin_panel,
    finish_panel,
    merge_panels,
    rescale_panel,
    see_less,
    soften,
)
from anaphora.runtime.kernels.panels import store_pairs
from anaphora.runtime.kernels.tile_attention import find_keys, score_panel
from anaphora.runtime.kernels.tiles import TILE_BYTES, Tiles, emit_tiles, transposed
from anaphora.runtime.kernels.vectors import I32, I64, Vectors, length, load_element

CHUNK_TOKENS = 64
"""So few that keys, values, scores and weights of one K/V head stay in the nearest cache while panels read them."""

SPAN_TOKENS = 512

PANEL, FIRST, LAST_FIRST, FIRST_END, END = range(5)
"""Columns of `items`: a panel; of the keys of the sequence that its 16 tokens see, the least and the greatest first one
and the least and the greatest end."""


def chunk_bytes(head_dim: int) -> int:
    """Room for a chunk: keys, values, scores, weights, which keys each token sees, where keys lie."""
    return 2 * CHUNK_TOKENS * 2 * head_dim + CHUNK_TOKENS * (64 + 32) + 2 * 64 + CHUNK_TOKENS


@kernel
def result_bytes(head_dim):
    """Room for one head of an item."""
    return 64 * head_dim + STATE_BYTES


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
def weigh_values(tc, values, tile_bytes, weights, count, out, num_tiles):
    """out += sums of len(num_tiles) × 16 numbers of values, weighted by an operand of `count` (a multiple of 32) keys.

    values: tiles, tile_bytes from 16 numbers to the next 16, one after another for the next 32 keys. out: float32.
    """
    num = length(num_tiles)

    def build(v: Vectors, tiles: Tiles, arguments: Any) -> None:
        values, tile_bytes, weights, count, out = arguments[:5]
        b = v.builder
        for t in range(num):
            tiles.load(t, v.at(out, TILE_BYTES * t), v.number(64))
        begins = [b.add(values, b.mul(tile_bytes, v.number(t))) for t in range(num)]
        with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (k, _):
            offset = b.mul(k, v.number(TILE_BYTES // 32))
            tiles.load(4, b.add(weights, offset), v.number(64))
            for t in range(num):
                tiles.load(5 + t % 3, b.add(begins[t], offset), v.number(64))
                tiles.multiply(t, 5 + t % 3, 4)
        for t in range(num):
            tiles.store(t, v.at(out, TILE_BYTES * t), v.number(64))

    signature = types.void(values, tile_bytes, weights, count, out, num_tiles)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def fetch_rows(tc, base, rows, num_rows, num_bytes):
    """Ask for what lies at `base + rows[i]`, which is read soon. num_bytes: of each, a multiple of 64."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        base, rows, num_rows, num_bytes = arguments
        b = v.builder
        with cgutils.for_range_slice(b, v.number(0), num_rows, v.number(1), I64) as (i, _):
            place = b.add(base, v.load(b.add(rows, b.mul(i, v.number(8))), I64, 8))
            with cgutils.for_range_slice(b, v.number(0), num_bytes, v.number(64), I64) as (n, _):
                v.fetch(b.add(place, n))

    signature = types.void(base, rows, num_rows, num_bytes)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@kernel
def attend_panels(
    queries, keys, values, rows, first_key, end_key, items, visible, kv_head, num_heads, num_kv_heads, scale, cap,
    sinks, room, results, apart, dim,
):  # fmt: skip
    """Attention of one sequence's items, for the query heads of one K/V head, to keys [first_key, end_key).

    An item is a panel, some of whose tokens are of the sequence.

    queries: address of operands [panels, num_heads, dim]; each is replaced by its result, if `apart` is false.
    rows: address of the byte offset of the sequence's key 0; offsets are readable from `first_key` on, up to a multiple
    of CHUNK_TOKENS. first_key: a multiple of CHUNK_TOKENS. items: int64 [n, 5]. visible: address of int32 [n, 2, 16],
    the first key that each token sees and the end; zeros for tokens of others. cap: soft cap of scores, 0: none.
    sinks: see merge_spans. room: address of `chunk_bytes`. results: of `result_bytes` for every item and head of a
    group; twice as many, for a span and those before it; or, `apart`, once for the only span, which stays there for
    `merge_spans`.
    """
    group = num_heads // num_kv_heads
    packed_values = room + CHUNK_TOKENS * 2 * dim
    scores = packed_values + CHUNK_TOKENS * 2 * dim
    weights = scores + CHUNK_TOKENS * 64
    seen = weights + CHUNK_TOKENS * 32
    table = seen + 2 * 64
    value_bytes = CHUNK_TOKENS // 32 * TILE_BYTES
    own = 64 * dim + STATE_BYTES
    offset = kv_head * dim * 2
    num_results, num_spans = len(items) * group, 0
    span = results
    for start in range(first_key, end_key, CHUNK_TOKENS):
        if num_spans == 0 or start % SPAN_TOKENS == 0:
            # The first span stays where it is, later ones lie behind it until they are merged with it.
            if num_spans > 1:
                for n in range(num_results):
                    merge_panels(results + n * own, span + n * own, dim, scale)
            if num_spans > 0:
                span = results + num_results * own
            num_spans += 1
            for n in range(num_results):
                begin_panel(span + n * own, dim, span + n * own + 64 * dim)
        here = min(CHUNK_TOKENS, end_key - start)
        row = rows + 8 * start
        if start == first_key:
            fetch_rows(keys + offset, row, here, 2 * dim)
        for t in range((here + 31) // 32):
            turn_values(values + offset, row + 8 * 32 * t, packed_values + t * TILE_BYTES, value_bytes, dim)
        find_keys(keys + offset, row, num_kv_heads * 2 * dim, dim, CHUNK_TOKENS, room, table)
        ahead = min(CHUNK_TOKENS, end_key - start - here)
        fetch_rows(keys + offset, row + 8 * CHUNK_TOKENS, ahead, 2 * dim)
        fetch_rows(values + offset, row + 8 * CHUNK_TOKENS, ahead, 2 * dim)
        for n in range(len(items)):
            begin = max(0, items[n, FIRST] - start) // 32
            count = min(items[n, END] - start, CHUNK_TOKENS)
            if count <= 32 * begin:
                continue
            end = (count + 31) // 32
            whole = min(end, (max(0, items[n, LAST_FIRST] - start) + 31) // 32)
            masked = max(whole, max(0, min(items[n, FIRST_END] - start, CHUNK_TOKENS)) // 32)
            see_less(visible + 128 * n, start, seen)
            for g in range(group):
                head = kv_head * group + g
                query = queries + (items[n, PANEL] * num_heads + head) * dim * 32
                panel = span + (n * group + g) * own
                state = panel + 64 * dim
                score_panel(table, query, dim, scores, (0, 0, 0, 0))
                if cap != 0:
                    soft_cap(scores + 64 * 32 * begin, 16 * 32 * (end - begin), scale / cap, cap / scale)
                soften(scores, begin, whole, masked, end, seen, scale, state, weights)
                rescale_panel(panel, dim, state + 128)
                weighed, blocks = weights + 1024 * begin, end - begin
                d = 0
                while d < dim // 16:
                    tile, target = packed_values + d * value_bytes + begin * TILE_BYTES, panel + d * TILE_BYTES
                    if d + 4 <= dim // 16:
                        weigh_values(tile, value_bytes, weighed, 32 * blocks, target, (0, 0, 0, 0))
                    else:
                        weigh_values(tile, value_bytes, weighed, 32 * blocks, target, (0, 0))
                    d += 4
    if apart:
        return
    for n in range(len(items)):
        for g in range(group):
            panel, head = results + (n * group + g) * own, kv_head * group + g
            if span != results:
                merge_panels(panel, panel + num_results * own, dim, scale)
            finish_head(panel, sinks, head, scale, queries + (items[n, PANEL] * num_heads + head) * dim * 32, dim)


@kernel
def finish_head(panel, sinks, head, scale, out, dim):
    """The values of a panel over its sum, as the operand at `out`. sinks: see merge_spans."""
    if sinks != 0:
        add_sink(panel + 64 * dim, load_element(sinks, head, (0, 0)) / scale, scale)
    finish_panel(panel, dim, panel + 64 * dim, out)


@kernel
def merge_spans(first, step, num_spans, sinks, head, query, scale, dim):
    """What `attend_panels` has left apart, `step` bytes from one span to the next, as the operand at `query`.

    sinks: address of a score (bfloat16, scaled) for each head, that takes probability and adds nothing. 0: none.
    """
    for span in range(1, num_spans):
        merge_panels(first, first + span * step, dim, scale)
    finish_head(first, sinks, head, scale, query, dim)
