"""What adapters of low rank add to a linear part's outputs in panels: two small products on the tile unit.

Knows addresses; must not know adapters' names or files. Matrices are bfloat16 here, as the model's own are, sums are
float32, and what an adapter adds joins a part's own sums before they are rounded. Parts that read the same numbers
stand below each other in one narrow matrix, so that these are read once:

    operand [count, 16] -> downs [rows, count] -> narrow operand [rows, 16] -> ups [outputs, numbers of rows] -> += sums

The tables, int64:

    downs    [inputs, adapters, 2]   address of the rows, and how many (a multiple of 32)
    ups      [parts, adapters, 3]    address, the first of the narrow numbers, and how many; both multiples of 32
    low_rank (owners, entries, lanes, narrow, narrow_bytes)
             a panel p has the adapters entries[owners[p] : owners[p + 1]]. lanes: address of int32 [entries, 16], -1
             for tokens of the adapter, or 0. narrow: address of the entries' operands, narrow_bytes apart
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.barrier import begin_turn, claim
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.panels import multiply_panels, pair, store_pairs
from anaphora.runtime.kernels.tiles import TILE_BYTES, Tiles, emit_tiles
from anaphora.runtime.kernels.vectors import I32, I64, Vectors, length

ATTENTION_INPUT, OUTPUT_INPUT, MLP_INPUT, DOWN_INPUT = range(4)
NUM_INPUTS = 4


@intrinsic
def shorten_lanes(tc, panel, count, lanes, out):
    """A panel of float32 as an operand; lanes that are 0 in `lanes` are zero, whatever they hold."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, count, lanes, out = arguments
        b, wide = v.builder, ir.VectorType(I32, 16)
        mask = v.load(lanes, wide, 4)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(2), I64) as (n, _):
            place = b.add(panel, b.mul(n, v.number(64)))
            pairs = pair(v, v.load_floats(place), v.load_floats(v.at(place, 64)))
            store_pairs(v, b.and_(pairs, mask), b.add(out, b.mul(n, v.number(32))))

    signature = types.void(panel, count, lanes, out)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def extend_sums(tc, rows, stride, operand, count, out, num_tiles):
    """A panel of float32 [16 × len(num_tiles)] at `out` += rows × an operand of `count` numbers, a multiple of 32.

    stride: bytes from one row to the next.
    """
    num = length(num_tiles)

    def build(v: Vectors, tiles: Tiles, arguments: Any) -> None:
        rows, stride, operand, count, out = arguments[:5]
        b = v.builder
        for t in range(num):
            tiles.load(t, v.at(out, TILE_BYTES * t), v.number(64))
        with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (k, _):
            tiles.load(6, b.add(operand, b.mul(k, v.number(TILE_BYTES // 32))), v.number(64))
            for t in range(num):
                first = b.add(rows, b.mul(stride, v.number(16 * t)))
                tiles.load(4 + t, b.add(first, b.mul(k, v.number(2))), stride)
                tiles.multiply(t, 4 + t, 6)
        for t in range(num):
            tiles.store(t, v.at(out, TILE_BYTES * t), v.number(64))

    signature = types.void(rows, stride, operand, count, out, num_tiles)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@kernel
def narrow_panel(downs, low_rank, panel, operand, size, scratch):
    """The narrow operands of a panel, of an operand [size]. downs: of one input. scratch: of a panel of 32."""
    owners, entries, lanes, narrow, narrow_bytes = low_rank
    for e in range(owners[panel], owners[panel + 1]):
        down, num_rows = downs[entries[e], 0], downs[entries[e], 1]
        for r in range(0, num_rows, 32):
            first = down + r * 2 * size
            multiply_panels(first, first + 16 * 2 * size, 2 * size, operand, 0, size, scratch, 0, (0,))
            shorten_lanes(scratch, 32, lanes + 64 * e, narrow + e * narrow_bytes + 32 * r)


@kernel
def narrow_panels(downs, low_rank, first_panel, num_panels, operands, size, scratch, claims, turn):
    """narrow_panel for the panels that this thread gets, of operands one after another."""
    begin_turn(claims, turn)
    todo = claim(claims, turn)
    while todo < num_panels:
        narrow_panel(downs, low_rank, first_panel + todo, operands + todo * size * 32, size, scratch)
        todo = claim(claims, turn)


@kernel
def add_adapters(ups, low_rank, panel, first_output, num_outputs, out):
    """Sums of a part's outputs from `first_output` on (a panel of float32 at `out`) += what the panel's adapters add.

    ups: of one part. num_outputs: a multiple of 16.
    """
    owners, entries, _, narrow, narrow_bytes = low_rank
    for e in range(owners[panel], owners[panel + 1]):
        up, first, count = ups[entries[e], 0], ups[entries[e], 1], ups[entries[e], 2]
        if count == 0:
            continue
        operand = narrow + e * narrow_bytes + 32 * first
        for n in range(0, num_outputs - 16, 32):
            rows = up + (first_output + n) * 2 * count
            extend_sums(rows, 2 * count, operand, count, out + 64 * n, (0, 0))
        if num_outputs % 32 != 0:
            n = num_outputs - 16
            extend_sums(up + (first_output + n) * 2 * count, 2 * count, operand, count, out + 64 * n, (0,))
