"""The softmax of a panel, chunk by chunk: its weights, and what becomes of the values that were weighed before.

Knows panels; knows nothing of keys and values. A panel [head_dim, 16 tokens] of float32 is a sum of weighted values,
and its state says what the weights are relative to: the largest score so far of each token, the sum of exponentials,
and, of the last chunk, by what earlier ones shrink.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.exponentials import short_power_of_two
from anaphora.runtime.kernels.panels import pair, store_pairs
from anaphora.runtime.kernels.tiles import Tiles, emit_tiles
from anaphora.runtime.kernels.vectors import F32, I32, I64, Vectors

LOWEST = -1e30
"""The largest score before there is one: finite, so that a difference of two is a number."""

STATE_BYTES = 3 * 64
"""Of one head of a panel."""

_LOG2_E = 1.4426950408889634


@intrinsic
def soften(tc, scores, begin, whole, masked, end, seen, scale, state, weights):
    """Softmax of one more chunk of scores [keys, 16]: weights as an operand whose pairs are the keys i and i + 16.

    Of its blocks of 32 keys, [begin, end) take part, and every token sees all keys of [whole, masked).
    seen: int32 [2, 16], the first key that each token sees, and how many it sees from there on.
    """

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        scores, begin, whole, masked_from, end, seen, scale, state, weights = arguments
        b, wide = v.builder, ir.VectorType(I32, 16)
        seen_from, num_seen = (v.load(v.at(seen, offset), wide, 4) for offset in (0, 64))
        parts = ((begin, whole, True), (whole, masked_from, False), (masked_from, end, True))
        lowest = v.constant(LOWEST)
        before = v.load_floats(state)
        # Several at a time, as each waits for the one before it.
        best = [cgutils.alloca_once_value(b, before) for _ in range(4)]
        total = cgutils.alloca_once_value(b, v.zero)

        def sees(key: Any) -> Any:
            # Keys before the first one are negative, which makes them large.
            return b.icmp_unsigned("<", b.sub(v.splat_integer(key), seen_from), num_seen)

        def larger(value: Any, other: Any) -> Any:
            return b.select(b.fcmp_ordered(">", value, other), value, other)

        def greatest(block: Any, masked: bool) -> None:
            place = b.add(scores, b.mul(block, v.number(32 * 64)))
            found = [b.load(each) for each in best]
            for i in range(32):
                value = v.load_floats(v.at(place, 64 * i))
                if masked:
                    value = b.select(sees(v.at(b.mul(block, v.number(32)), i)), value, lowest)
                found[i % 4] = larger(value, found[i % 4])
            for each, value in zip(best, found, strict=True):
                b.store(value, each)

        for first, last, masked in parts:
            with cgutils.for_range_slice(b, first, last, v.number(1), I64) as (block, _):
                greatest(block, masked)
        found = [b.load(each) for each in best]
        top, factor = (
            larger(larger(found[0], found[1]), larger(found[2], found[3])),
            v.splat(b.fmul(scale, ir.Constant(F32, _LOG2_E))),
        )
        shift = b.fneg(b.fmul(top, factor))
        kept = short_power_of_two(v, b.fmul(b.fsub(before, top), factor))

        def weigh(block: Any, masked: bool) -> None:
            place, target = b.add(scores, b.mul(block, v.number(32 * 64))), b.add(weights, b.mul(block, v.number(1024)))
            added = b.load(total)
            for i in range(16):
                both = []
                for key in (i, i + 16):
                    value = short_power_of_two(v, v.fma(v.load_floats(v.at(place, 64 * key)), factor, shift))
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

        for first, last, masked in parts:
            with cgutils.for_range_slice(b, first, last, v.number(1), I64) as (block, _):
                weigh(block, masked)
        v.store_floats(top, state)
        v.store_floats(v.fma(v.load_floats(v.at(state, 64)), kept, b.load(total)), v.at(state, 64))
        v.store_floats(kept, v.at(state, 128))

    signature = types.void(scores, begin, whole, masked, end, seen, scale, state, weights)
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
def merge_panels(tc, panel, other, count, scale):
    """panel [count, 16] takes in another of the same tokens, of later keys. States lie behind the panels."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, other, count, scale = arguments
        b, factor = v.builder, v.splat(v.builder.fmul(scale, ir.Constant(F32, _LOG2_E)))
        states = [b.add(place, b.mul(count, v.number(64))) for place in (panel, other)]
        tops = [v.load_floats(state) for state in states]
        top = b.select(b.fcmp_ordered(">", tops[1], tops[0]), tops[1], tops[0])
        kept, taken = (short_power_of_two(v, b.fmul(b.fsub(one, top), factor)) for one in tops)
        sums = [v.load_floats(v.at(state, 64)) for state in states]
        with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
            places = [b.add(place, b.mul(n, v.number(64))) for place in (panel, other)]
            values = [v.load_floats(place) for place in places]
            v.store_floats(v.fma(values[1], taken, b.fmul(values[0], kept)), places[0])
        v.store_floats(top, states[0])
        v.store_floats(v.fma(sums[1], taken, b.fmul(sums[0], kept)), v.at(states[0], 64))

    signature = types.void(panel, other, count, scale)
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
def add_sink(tc, state, sink, scale):
    """One more score, which takes probability and adds nothing; not for lanes without any.

    sink: before it is scaled, like the scores. Where it is far larger than these, the sum is infinite and nothing is
    left of the values.
    """

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        state, sink, scale = arguments
        b, factor = v.builder, v.splat(v.builder.fmul(scale, ir.Constant(F32, _LOG2_E)))
        total = v.load_floats(v.at(state, 64))
        more = short_power_of_two(v, b.fmul(b.fsub(v.splat(sink), v.load_floats(state)), factor))
        nothing = b.fcmp_ordered("==", total, v.zero)
        v.store_floats(b.select(nothing, total, b.fadd(total, more)), v.at(state, 64))

    signature = types.void(state, sink, scale)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def see_less(tc, visible, count, out):
    """visible: int32 [2, 16], the first key that a token sees and the one behind the last. out: see `soften`, for the
    keys from `count` on.
    """

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        visible, count, out = arguments
        b, wide = v.builder, ir.VectorType(I32, 16)
        first, end = (v.load(v.at(visible, offset), wide, 4) for offset in (0, 64))
        store_pairs(v, b.sub(first, v.splat_integer(count)), out)
        store_pairs(v, b.sub(end, first), v.at(out, 64))

    signature = types.void(visible, count, out)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)
