"""Panels: 16 tokens side by side, number by number, which is how the tile unit gives and takes them.

    panel     [count, 16 tokens]          hidden states in bfloat16; sums in float32, as the tile unit stores them
    operand   [count / 2, 16 tokens, 2]   bfloat16, what the tile unit multiplies a weight with

So a layer needs no transposition between its products: a sum over a token's numbers is a sum of vectors, and two rows
of a panel, rounded, are one row of an operand. Knows addresses; knows nothing of layers. Every function here is
nothing on a CPU without tiles.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.exponentials import gated
from anaphora.runtime.kernels.tiles import TILE_BYTES, Tiles, emit_tiles, transposed
from anaphora.runtime.kernels.vectors import I16, I32, I64, Vectors, length

PANEL_TOKENS = 16


def pair(v: Vectors, low: Any, high: Any) -> Any:
    """Two vectors of float32 as one of pairs of bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    b, wide = v.builder, ir.VectorType(I32, v.lanes)

    def rounded(value: Any) -> Any:
        bits = b.bitcast(value, wide)
        odd = b.and_(b.lshr(bits, ir.Constant(wide, [16] * v.lanes)), ir.Constant(wide, [1] * v.lanes))
        up = b.add(bits, b.add(odd, ir.Constant(wide, [0x7FFF] * v.lanes)))
        is_nan = b.fcmp_unordered("uno", value, value)
        return b.select(is_nan, b.or_(bits, ir.Constant(wide, [0x400000] * v.lanes)), up)

    upper = b.and_(rounded(high), ir.Constant(wide, [-65536] * v.lanes))
    return b.or_(b.lshr(rounded(low), ir.Constant(wide, [16] * v.lanes)), upper)


def store_pairs(v: Vectors, pairs: Any, address: Any) -> None:
    v.builder.store(pairs, v.builder.inttoptr(address, pairs.type.as_pointer())).align = 4


def _weight(v: Vectors, address: Any, offset: Any = None) -> Any:
    """One element in every lane, with a float32 `offset` added."""
    raw = v.builder.zext(v.load(address, I16, 2), I32)
    value = v.builder.bitcast(v.builder.shl(raw, ir.Constant(I32, 16)), v.zero.type.element)
    return v.splat(value if offset is None else v.builder.fadd(value, offset))


def _rsqrt_of_mean(v: Vectors, total: Any, count: Any, eps: Any) -> Any:
    b = v.builder
    mean = b.fdiv(total, v.splat(b.sitofp(count, v.zero.type.element)))
    return b.fdiv(v.constant(1.0), v.each("sqrt", b.fadd(mean, v.splat(eps))))


@intrinsic
def multiply_panels(tc, first, second, stride, operand, operand_bytes, count, out, out_bytes, num_panels):
    """Sums of 16 weight rows at `first` and 16 at `second`: 32 rows of a panel at `out`, float32.

    stride: bytes from one weight row to the next. operand: of `count` (a multiple of 32) numbers.
    num_panels: its length, 1 or 2; operands are operand_bytes apart, and their sums out_bytes.
    """
    panels = length(num_panels)

    def build(v: Vectors, tiles: Tiles, arguments: Any) -> None:
        first, second, stride, operand, operand_bytes, count, out, out_bytes = arguments[:8]
        b = v.builder

        def load(tile: int, k: Any) -> None:
            if tile < 6:
                tiles.load(tile, b.add((first, second)[tile - 4], b.mul(k, v.number(2))), stride)
                return
            place = b.add(operand, b.mul(operand_bytes, v.number(tile - 6)))
            tiles.load_once(tile, b.add(place, b.mul(k, v.number(TILE_BYTES // 32))), v.number(64))

        def multiply(k: Any) -> None:
            """Each tile takes what comes next (k, None: nothing) as soon as its last product is on its way."""
            for i in range(panels):
                for j in range(2):
                    tiles.multiply(2 * i + j, 4 + j, 6 + i)
                    if k is not None and i == panels - 1:
                        load(4 + j, k)
                if k is not None:
                    load(6 + i, k)

        for total in range(2 * panels):
            tiles.zero(total)
        for tile in range(4, 6 + panels):
            load(tile, v.number(0))
        with cgutils.for_range_slice(b, v.number(32), count, v.number(32), I64) as (k, _):
            multiply(k)
        multiply(None)
        for i in range(panels):
            place = b.add(out, b.mul(out_bytes, v.number(i)))
            for j in range(2):
                tiles.store(2 * i + j, v.at(place, TILE_BYTES * j), v.number(64))

    signature = types.void(first, second, stride, operand, operand_bytes, count, out, out_bytes, num_panels)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def normalise_panel(tc, hidden, weight, eps, offset, count, out):
    """RMS norm of a panel of bfloat16, by weight + offset, as an operand."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        hidden, weight, eps, offset, count, out = arguments
        b, total = v.builder, cgutils.alloca_once_value(v.builder, v.zero)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
            value = v.load_elements(b.add(hidden, b.mul(n, v.number(32))))
            b.store(v.fma(value, value, b.load(total)), total)
        factor = _rsqrt_of_mean(v, b.load(total), count, eps)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(2), I64) as (n, _):
            both = []
            for i in range(2):
                value = v.load_elements(v.at(b.add(hidden, b.mul(n, v.number(32))), 32 * i))
                scale = _weight(v, v.at(b.add(weight, b.mul(n, v.number(2))), 2 * i), offset)
                both.append(b.fmul(b.fmul(value, factor), scale))
            store_pairs(v, pair(v, *both), b.add(out, b.mul(n, v.number(32))))

    signature = types.void(hidden, weight, eps, offset, count, out)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def add_panel_bias(tc, panel, bias, count):
    """panel += bias, one element for each row; panel: float32."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, bias, count = arguments
        b = v.builder
        with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
            place = b.add(panel, b.mul(n, v.number(64)))
            value = _weight(v, b.add(bias, b.mul(n, v.number(2))))
            v.store_floats(b.fadd(v.load_floats(place), value), place)

    signature = types.void(panel, bias, count)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


def _factor_of_floats(v: Vectors, panel: Any, count: Any, eps: Any) -> Any:
    """What an RMS norm multiplies the tokens of a panel of float32 with."""
    b, total = v.builder, cgutils.alloca_once_value(v.builder, v.zero)
    with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
        value = v.load_floats(b.add(panel, b.mul(n, v.number(64))))
        b.store(v.fma(value, value, b.load(total)), total)
    return _rsqrt_of_mean(v, b.load(total), count, eps)


@intrinsic
def scale_panel(tc, panel, weight, eps, offset, count):
    """RMS norm of a panel of float32, by weight + offset, in place."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, weight, eps, offset, count = arguments
        b, factor = v.builder, _factor_of_floats(v, panel, count, eps)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
            place = b.add(panel, b.mul(n, v.number(64)))
            scale = b.fmul(factor, _weight(v, b.add(weight, b.mul(n, v.number(2))), offset))
            v.store_floats(b.fmul(v.load_floats(place), scale), place)

    signature = types.void(panel, weight, eps, offset, count)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def add_normalised_panel(tc, hidden, panel, weight, eps, offset, count):
    """hidden += RMS norm of a panel of float32, by weight + offset, rounded; hidden: panel of bfloat16."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        hidden, panel, weight, eps, offset, count = arguments
        b, factor = v.builder, _factor_of_floats(v, panel, count, eps)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
            place, scale = (
                b.add(hidden, b.mul(n, v.number(32))),
                _weight(v, b.add(weight, b.mul(n, v.number(2))), offset),
            )
            added = b.fmul(v.load_floats(b.add(panel, b.mul(n, v.number(64)))), b.fmul(factor, scale))
            v.store_elements(b.fadd(v.load_elements(place), added), place)

    signature = types.void(hidden, panel, weight, eps, offset, count)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def turn_panel(tc, panel, cos, sin, count):
    """Rotary embedding of a head [count, 16] float32 in place; cos, sin: panels, the sine's first half negated."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, cos, sin, count = arguments
        b = v.builder
        half = b.lshr(count, v.number(1))
        across = b.mul(half, v.number(64))
        with cgutils.for_range_slice(b, v.number(0), half, v.number(1), I64) as (n, _):
            first = b.mul(n, v.number(64))
            second = b.add(first, across)
            low, high = (v.load_floats(b.add(panel, at)) for at in (first, second))
            for at, own, other in ((first, low, high), (second, high, low)):
                crossed = b.fmul(other, v.load_floats(b.add(sin, at)))
                v.store_floats(v.fma(own, v.load_floats(b.add(cos, at)), crossed), b.add(panel, at))

    signature = types.void(panel, cos, sin, count)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def shorten_panel(tc, panel, count, out):
    """A panel of float32 as an operand."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, count, out = arguments
        b = v.builder
        with cgutils.for_range_slice(b, v.number(0), count, v.number(2), I64) as (n, _):
            place = b.add(panel, b.mul(n, v.number(64)))
            pairs = pair(v, v.load_floats(place), v.load_floats(v.at(place, 64)))
            store_pairs(v, pairs, b.add(out, b.mul(n, v.number(32))))

    signature = types.void(panel, count, out)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def turn_to_rows(tc, panel, count, out, row_bytes):
    """A panel of float32 as 16 rows of `count` (a multiple of 16) bfloat16."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, count, out, row_bytes = arguments
        b = v.builder
        with cgutils.for_range_slice(b, v.number(0), count, v.number(16), I64) as (n, _):
            place = b.add(panel, b.mul(n, v.number(64)))
            lines = transposed(v, [v.load_floats(v.at(place, 64 * i)) for i in range(16)])
            for i, line in enumerate(lines):
                row = b.add(out, b.mul(row_bytes, v.number(i)))
                v.store_elements(line, b.add(row, b.mul(n, v.number(2))))

    signature = types.void(panel, count, out, row_bytes)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def turn_operand(tc, operand, count, out, row_bytes):
    """An operand of `count` (a multiple of 32) numbers as 16 rows."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        operand, count, out, row_bytes = arguments
        b, kind = v.builder, ir.VectorType(I32, 16)
        with cgutils.for_range_slice(b, v.number(0), count, v.number(32), I64) as (n, _):
            place = b.add(operand, b.mul(n, v.number(32)))
            lines = transposed(v, [v.load(v.at(place, 64 * i), kind, 4) for i in range(16)])
            for i, line in enumerate(lines):
                store_pairs(v, line, b.add(b.add(out, b.mul(row_bytes, v.number(i))), b.mul(n, v.number(2))))

    signature = types.void(operand, count, out, row_bytes)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def add_to_panel(tc, hidden, panel, count):
    """hidden += panel, rounded; hidden: panel of bfloat16."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        hidden, panel, count = arguments
        b = v.builder
        with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (n, _):
            place = b.add(hidden, b.mul(n, v.number(32)))
            added = v.load_floats(b.add(panel, b.mul(n, v.number(64))))
            v.store_elements(b.fadd(v.load_elements(place), added), place)

    signature = types.void(hidden, panel, count)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)


@intrinsic
def gate_panel(tc, panel, linear, cubic, out):
    """Activation of 16 rows of gates × the 16 rows of float32 behind them, as an operand. linear, cubic: see `gate`."""

    def build(v: Vectors, _: Tiles, arguments: Any) -> None:
        panel, linear, cubic, out = arguments
        factors = v.splat(linear), v.splat(cubic)
        for i in range(0, 16, 2):
            both = []
            for row in (i, i + 1):
                value, up = v.load_floats(v.at(panel, 64 * row)), v.load_floats(v.at(panel, 64 * (16 + row)))
                both.append(gated(v, value, up, factors))
            store_pairs(v, pair(v, *both), v.at(out, 32 * i))

    signature = types.void(panel, linear, cubic, out)
    return signature, lambda c, b, _, arguments: emit_tiles(c, b, build, arguments)
