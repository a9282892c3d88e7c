"""Softmax of a chunk's scores for 16 queries, each in its own lane, with the next chunk's keys asked for meanwhile.

Knows addresses of scores [keys, 16] and which keys a lane sees; knows nothing of keys, values and products.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.exponentials import short_power_of_two
from anaphora.runtime.kernels.tiles import Tiles, emit_tiles, transposed
from anaphora.runtime.kernels.vectors import F32, I32, I64, LINE_BYTES, Vectors, length

BLOCK = 32
"""Keys that the tile unit adds up at a time."""

_LOG2_E = 1.4426950408889634


def fetch_rows(v: Vectors, base: Any, rows: Any, numbers: tuple[int, ...], num_bytes: int) -> None:
    """Ask for rows that are read soon, at `base` and the offsets that stand in `rows`."""
    for number in numbers:
        row = v.builder.add(base, v.load(v.at(rows, 8 * number), I64, 8))
        for n in range(0, num_bytes, LINE_BYTES):
            v.fetch(v.at(row, n))


@intrinsic
def soften_panel(
    tc, scores, begin, whole_begin, whole_end, end, first, visible, scale, weights, stride, tops, sums, next_keys,
    next_rows, head_dim,
):  # fmt: skip
    """Softmax of scores [keys, 16] from block `begin` to `end`, of 32 keys; no key elsewhere is seen.

    Every lane sees all keys of the blocks [whole_begin, whole_end), and keys [first, visible) elsewhere: int32 [16].
    weights: [16, ...] bfloat16, `stride` bytes from one lane's to the next, in pairs of keys i and i + 16. tops, sums:
    float32 [16], of each lane the largest score, and the sum of its exponentials. next_keys, next_rows: of the keys of
    head_dim that are asked for meanwhile.
    """

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        scores, begin, whole_begin, whole_end, end, first, visible, scale, weights, stride, tops, sums = arguments[:12]
        next_keys, next_rows = arguments[12:14]
        b, wide = v.builder, ir.VectorType(I32, 16)
        seen_from, seen_to = v.load(first, wide, 4), v.load(visible, wide, 4)
        lowest = v.constant(float("-inf"))
        best = [cgutils.alloca_once_value(b, lowest) for _ in range(2)]
        totals = [cgutils.alloca_once_value(b, v.zero) for _ in range(2)]

        def sees(block: Any, i: int) -> Any:
            key = v.splat_integer(v.at(b.mul(block, v.number(BLOCK)), i))
            return b.and_(b.icmp_signed(">=", key, seen_from), b.icmp_signed("<", key, seen_to))

        def greatest(block: Any, masked: bool) -> None:
            place = b.add(scores, b.mul(block, v.number(BLOCK * 64)))
            found = [b.load(each) for each in best]
            for i in range(BLOCK):
                value = v.load_floats(v.at(place, 64 * i))
                if masked:
                    value = b.select(sees(block, i), value, lowest)
                before = found[i % 2]
                found[i % 2] = b.select(b.fcmp_ordered(">", value, before), value, before)
            for each, value in zip(best, found, strict=True):
                b.store(value, each)

        ranges = ((begin, whole_begin, True), (whole_begin, whole_end, False), (whole_end, end, True))
        for low, high, masked in ranges:
            with cgutils.for_range_slice(b, low, high, v.number(1), I64) as (block, _):
                greatest(block, masked)
        top, other = (b.load(each) for each in best)
        top = b.select(b.fcmp_ordered(">", other, top), other, top)
        factor = v.splat(b.fmul(scale, ir.Constant(F32, _LOG2_E)))

        def weigh(block: Any, masked: bool) -> None:
            place = b.add(scores, b.mul(block, v.number(BLOCK * 64)))
            later = b.add(next_rows, b.mul(block, v.number(8 * BLOCK)))
            added, lines = [b.load(each) for each in totals], []
            for i in range(BLOCK // 2):
                fetch_rows(v, next_keys, later, (i, i + 16), 32 * length(head_dim))
                both = []
                for k, key in enumerate((i, i + 16)):
                    value = b.fsub(v.load_floats(v.at(place, 64 * key)), top)
                    value = short_power_of_two(v, b.fmul(value, factor))
                    if masked:
                        value = b.select(sees(block, key), value, v.zero)
                    added[k] = b.fadd(added[k], value)
                    both.append(value)
                # Half up is near enough, and no NaN is lost, as the sum has it.
                low, high = (b.add(b.bitcast(value, wide), ir.Constant(wide, [0x8000] * 16)) for value in both)
                low = b.lshr(low, ir.Constant(wide, [16] * 16))
                lines.append(b.or_(low, b.and_(high, ir.Constant(wide, [-65536] * 16))))
            for each, value in zip(totals, added, strict=True):
                b.store(value, each)
            target = b.add(weights, b.mul(block, v.number(2 * BLOCK)))
            for i, line in enumerate(transposed(v, lines)):
                at = b.add(target, b.mul(stride, v.number(i)))
                b.store(line, b.inttoptr(at, wide.as_pointer())).align = 4

        for low, high, masked in ranges:
            with cgutils.for_range_slice(b, low, high, v.number(1), I64) as (block, _):
                weigh(block, masked)
        v.store_floats(top, tops)
        v.store_floats(b.fadd(*(b.load(each) for each in totals)), sums)

    signature = types.void(
        scores, begin, whole_begin, whole_end, end, first, visible, scale, weights, stride, tops, sums, next_keys,
        next_rows, head_dim,
    )  # fmt: skip
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)
