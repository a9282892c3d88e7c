"""Pieces of LLVM code that Numba's own compiler does not find: wide vectors in registers, products of bfloat16.

Knows LLVM and the lanes of the CPU that it compiles for; knows nothing of models. Memory is addressed by integers: a
function's sizes that must be constants for the compiler arrive as the *length* of a tuple (`len` of its type), which
is part of the signature by which Numba files compiled code on disk.

Elements are bfloat16 (tuple of 2: bytes) or float32 (tuple of 4). Operands are what elements are multiplied with:

    float32     as it is
    bfloat16    as float32, in runs of 2 × lanes: the even ones, then the odd ones, which is how a register of bfloat16
                falls apart. (The CPU's own products of bfloat16 pairs, where it has them, are no faster than this.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def features(context: Any) -> str:
    """What the CPU that code is made for can do; Numba files compiled code by it."""
    return str(context.codegen()._tm_features)


def lanes(context: Any) -> int:
    """float32 numbers in one register."""
    found = features(context)
    return 16 if "+avx512f" in found and "+avx512bw" in found else 8


class Vectors:
    """Builds code for vectors of one element type."""

    def __init__(self, context: Any, builder: Any, element_bytes: int) -> None:
        self.builder = builder
        self.lanes = lanes(context)
        self.element_bytes = element_bytes
        self.type = ir.VectorType(F32, self.lanes)
        self.zero = ir.Constant(self.type, [0.0] * self.lanes)
        self.per_step = self.lanes if element_bytes == 4 else 2 * self.lanes
        """Elements that one `multiply` takes."""

    def number(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def at(self, address: Any, offset: int) -> Any:
        return self.builder.add(address, self.number(offset)) if offset else address

    def load(self, address: Any, kind: Any, align: int) -> Any:
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), typ=kind)
        value.align = align
        return value

    def load_floats(self, address: Any) -> Any:
        return self.load(address, self.type, 4)

    def store_floats(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, self.type.as_pointer())).align = 4

    def load_elements(self, address: Any) -> Any:
        """`lanes` elements as float32."""
        if self.element_bytes == 4:
            return self.load_floats(address)
        wide = ir.VectorType(I32, self.lanes)
        raw = self.builder.zext(self.load(address, ir.VectorType(I16, self.lanes), 2), wide)
        return self.builder.bitcast(self.builder.shl(raw, ir.Constant(wide, [16] * self.lanes)), self.type)

    def splat(self, scalar: Any) -> Any:
        undefined = ir.Constant(self.type, ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(
            single, undefined, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        )

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(self.type, [self.type] * 3), f"llvm.fma.v{self.lanes}f32"
        )
        return self.builder.call(function, [a, b, c])

    def load_step(self, address: Any) -> tuple[Any, ...]:
        """`per_step` elements, ready for `multiply`."""
        if self.element_bytes == 4:
            return (self.load_floats(address),)
        wide = ir.VectorType(I32, self.lanes)
        pairs = self.load(address, wide, 2)
        even = self.builder.shl(pairs, ir.Constant(wide, [16] * self.lanes))
        odd = self.builder.and_(pairs, ir.Constant(wide, [-65536] * self.lanes))
        return self.builder.bitcast(even, self.type), self.builder.bitcast(odd, self.type)

    def load_operand(self, address: Any) -> tuple[Any, ...]:
        """What `per_step` elements are multiplied with."""
        if self.element_bytes == 4:
            return (self.load_floats(address),)
        return self.load_floats(address), self.load_floats(self.at(address, 4 * self.lanes))

    def multiply(self, elements: tuple[Any, ...], operand: tuple[Any, ...], total: Any) -> Any:
        """total + products, lane by lane."""
        for element, other in zip(elements, operand, strict=True):
            total = self.fma(element, other, total)
        return total

    def sum_each(self, vectors: Sequence[Any]) -> Any:
        """Sum of the lanes of each of `lanes` vectors, in one vector.

        Halves the number of vectors at each turn: neighbouring lanes are added, and two vectors become one.
        """
        todo, n = list(vectors), self.lanes
        mask_type = ir.VectorType(I32, n)
        while len(todo) > 1:
            even = ir.Constant(mask_type, list(range(0, 2 * n, 2)))
            odd = ir.Constant(mask_type, list(range(1, 2 * n, 2)))
            todo = [
                self.builder.fadd(self.builder.shuffle_vector(a, b, even), self.builder.shuffle_vector(a, b, odd))
                for a, b in zip(todo[::2], todo[1::2], strict=True)
            ]
        return todo[0]

    def sum_lanes(self, vector: Any) -> Any:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(F32, [F32, self.type]), f"llvm.vector.reduce.fadd.v{self.lanes}f32"
        )
        return self.builder.call(function, [ir.Constant(F32, 0.0), vector], fastmath=("reassoc",))


def _length(kind: Any) -> int:
    return len(kind)


def _void(build: Callable[[Vectors, Any, tuple[int, ...]], None], signature: Any, sizes: tuple[int, ...]) -> Any:
    """An intrinsic without result: `build(vectors, arguments, sizes)`, the last size being the element's bytes."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        build(Vectors(context, builder, sizes[-1]), arguments, sizes)
        return context.get_dummy_value()

    return signature, generate


def _dot(v: Vectors, arguments: Any, sizes: tuple[int, ...]) -> None:
    x, x_stride, w, w_stride, count, out, out_stride = arguments[:7]
    b, (num_x, num_w, _) = v.builder, sizes
    totals = [cgutils.alloca_once_value(b, v.zero) for _ in range(num_x * num_w)]
    xs = [x]
    ws = [w]
    for _ in range(num_x - 1):
        xs.append(b.add(xs[-1], x_stride))
    for _ in range(num_w - 1):
        ws.append(b.add(ws[-1], w_stride))
    with cgutils.for_range_slice(b, v.number(0), count, v.number(v.per_step), I64) as (k, _):
        w_offset = b.mul(k, v.number(v.element_bytes))
        x_offset = b.mul(k, v.number(4))
        elements = [v.load_step(b.add(address, w_offset)) for address in ws]
        for i, address in enumerate(xs):
            operand = v.load_operand(b.add(address, x_offset))
            for j in range(num_w):
                total = totals[i * num_w + j]
                b.store(v.multiply(elements[j], operand, b.load(total)), total)
    sums = [b.load(total) for total in totals]
    if len(sums) == 1:
        b.store(v.sum_lanes(sums[0]), b.inttoptr(out, F32.as_pointer()))
        return
    sums += [v.zero] * (-len(sums) % v.lanes)
    summed = [v.sum_each(sums[i : i + v.lanes]) for i in range(0, len(sums), v.lanes)]
    part = ir.VectorType(F32, num_w)
    for i in range(num_x):
        vector, first = summed[i * num_w // v.lanes], i * num_w % v.lanes
        mask = ir.Constant(ir.VectorType(I32, num_w), list(range(first, first + num_w)))
        row = b.add(out, b.mul(out_stride, v.number(i)))
        b.store(b.shuffle_vector(vector, vector, mask), b.inttoptr(row, part.as_pointer())).align = 4


@intrinsic
def dot(tc, x, x_stride, w, w_stride, count, out, out_stride, num_x, num_w, element):  # type: ignore[no-untyped-def]
    """out[i, j] = sum over `count` of operand x[i] × element w[j], in float32. Strides in bytes.

    count: a multiple of 2 × lanes (bfloat16) or lanes (float32).
    """
    sizes = (_length(num_x), _length(num_w), _length(element))
    return _void(_dot, types.void(x, x_stride, w, w_stride, count, out, out_stride, num_x, num_w, element), sizes)


def _score(v: Vectors, arguments: Any, sizes: tuple[int, ...]) -> None:
    query, keys, rows, out = arguments[:4]
    steps = sizes[0] * 16 // v.per_step
    operands = [v.load_operand(v.at(query, 4 * i * v.per_step)) for i in range(steps)]
    totals = []
    for t in range(v.lanes):
        key = v.builder.add(keys, v.load(v.at(rows, 8 * t), I64, 8))
        total = v.zero
        for i in range(steps):
            total = v.multiply(v.load_step(v.at(key, i * v.per_step * v.element_bytes)), operands[i], total)
        totals.append(total)
    v.store_floats(v.sum_each(totals), out)


@intrinsic
def score(tc, query, keys, rows, out, head_dim, element):  # type: ignore[no-untyped-def]
    """out[t] = query · key at `keys + rows[t]` for `lanes` tokens. head_dim: a tuple of a 16th of its length."""
    sizes = (_length(head_dim), _length(element))
    return _void(_score, types.void(query, keys, rows, out, head_dim, element), sizes)


def _weigh(v: Vectors, arguments: Any, sizes: tuple[int, ...]) -> None:
    weights, weights_stride, values, rows, count, out, out_stride = arguments[:7]
    b, (num_heads, sixteenths, _) = v.builder, sizes
    width = sixteenths * 16 // v.lanes
    totals = [cgutils.alloca_once_value(b, v.zero) for _ in range(num_heads * width)]
    with cgutils.for_range_slice(b, v.number(0), count, v.number(1), I64) as (t, _):
        row = b.add(values, v.load(b.add(rows, b.mul(t, v.number(8))), I64, 8))
        value = [v.load_elements(v.at(row, i * v.lanes * v.element_bytes)) for i in range(width)]
        for h in range(num_heads):
            address = b.add(weights, b.add(b.mul(t, v.number(4)), b.mul(weights_stride, v.number(h))))
            weight = v.splat(v.load(address, F32, 4))
            for i in range(width):
                total = totals[h * width + i]
                b.store(v.fma(weight, value[i], b.load(total)), total)
    for h in range(num_heads):
        for i in range(width):
            address = b.add(out, b.mul(out_stride, v.number(h)))
            v.store_floats(b.load(totals[h * width + i]), v.at(address, 4 * i * v.lanes))


@intrinsic
def weigh(tc, weights, weights_stride, values, rows, count, out, out_stride, num_heads, head_dim, element):  # type: ignore[no-untyped-def]
    """out[h] = sum over t < count of weights[h, t] × value at `values + rows[t]`; float32 out, strides in bytes."""
    sizes = (_length(num_heads), _length(head_dim), _length(element))
    signature = types.void(
        weights, weights_stride, values, rows, count, out, out_stride, num_heads, head_dim, element
    )
    return _void(_weigh, signature, sizes)


@intrinsic
def num_lanes(tc):  # type: ignore[no-untyped-def]
    """Tokens that one `score` takes."""
    return types.int64(), lambda context, builder, _, args: ir.Constant(I64, lanes(context))


@intrinsic
def load_element(tc, address, element):  # type: ignore[no-untyped-def]
    size = _length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        if size == 4:
            return builder.load(builder.inttoptr(arguments[0], F32.as_pointer()), typ=F32)
        raw = builder.load(builder.inttoptr(arguments[0], I16.as_pointer()), typ=I16)
        return builder.bitcast(builder.shl(builder.zext(raw, I32), ir.Constant(I32, 16)), F32)

    return types.float32(address, element), generate


def _rounded(builder: Any, value: Any) -> Any:
    """float32 -> the upper 16 bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, I32)
    lsb = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    up = builder.lshr(builder.add(builder.add(bits, ir.Constant(I32, 0x7FFF)), lsb), ir.Constant(I32, 16))
    nan = builder.or_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), nan, up), I16)


@intrinsic
def store_element(tc, address, value, element):  # type: ignore[no-untyped-def]
    size = _length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        if size == 4:
            builder.store(arguments[1], builder.inttoptr(arguments[0], F32.as_pointer()))
        else:
            builder.store(_rounded(builder, arguments[1]), builder.inttoptr(arguments[0], I16.as_pointer()))
        return context.get_dummy_value()

    return types.void(address, types.float32, element), generate


def _operand_place(builder: Any, base: Any, index: Any, num_lanes: int, element_bytes: int) -> Any:
    if element_bytes == 2:
        half = builder.lshr(builder.and_(index, ir.Constant(I64, 2 * num_lanes - 1)), ir.Constant(I64, 1))
        odd = builder.mul(builder.and_(index, ir.Constant(I64, 1)), ir.Constant(I64, num_lanes))
        index = builder.add(builder.and_(index, ir.Constant(I64, -2 * num_lanes)), builder.add(odd, half))
    return builder.inttoptr(builder.add(base, builder.mul(index, ir.Constant(I64, 4))), F32.as_pointer())


@intrinsic
def store_operand(tc, address, index, value, element):  # type: ignore[no-untyped-def]
    """Put number `index` of an operand at `address`, rounded as an element is."""
    size = _length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        base, index, value = arguments[:3]
        if size == 2:
            wide = builder.shl(builder.zext(_rounded(builder, value), I32), ir.Constant(I32, 16))
            value = builder.bitcast(wide, F32)
        builder.store(value, _operand_place(builder, base, index, lanes(context), size))
        return context.get_dummy_value()

    return types.void(address, index, types.float32, element), generate


@intrinsic
def address_of(tc, array):  # type: ignore[no-untyped-def]
    """Where an array's data begin."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)

    return types.int64(array), generate


def _tail(v: Vectors, begin: Any, count: Any) -> Any:
    """Which lanes of the vector that begins at `begin` lie before `count`."""
    kind = ir.VectorType(I64, v.lanes)
    numbers = ir.Constant(kind, list(range(v.lanes)))
    left = v.builder.insert_element(ir.Constant(kind, ir.Undefined), v.builder.sub(count, begin), ir.Constant(I32, 0))
    left = v.builder.shuffle_vector(
        left, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, v.lanes), [0] * v.lanes)
    )
    return v.builder.icmp_signed("<", numbers, left)


def _exp(v: Vectors, x: Any) -> Any:
    """exp of x <= 0, relative error below 1e-6; 0 from -87 down; NaN of NaN. As 2 ** n × 2 ** f with |f| <= 1/2."""
    b, kind = v.builder, v.type

    def constant(value: float) -> Any:
        return ir.Constant(kind, [value] * v.lanes)

    def unary(name: str, value: Any) -> Any:
        function = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(kind, [kind]), f"llvm.{name}.v{v.lanes}f32"
        )
        return b.call(function, [value])

    scaled = b.fmul(x, constant(1.4426950408889634))
    n = unary("rint", scaled)
    # ln 2 in two parts: the first is exact in float32, and so is its product with n.
    f = v.fma(n, constant(-0.693145751953125), x)
    f = v.fma(n, constant(-1.4286068203094172e-06), f)
    result = constant(1 / 720)
    for factor in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        result = v.fma(result, f, constant(factor))
    wide = ir.VectorType(I32, v.lanes)
    is_small = b.fcmp_ordered("<", x, constant(-87.0))
    power = b.fptosi(b.select(is_small, constant(0.0), n), wide)
    # A NaN gives some power or other, and its product with the NaN in `result` is NaN again.
    bits = b.shl(b.add(power, ir.Constant(wide, [127] * v.lanes)), ir.Constant(wide, [23] * v.lanes))
    is_nan = b.fcmp_unordered("uno", x, x)
    return b.select(is_nan, x, b.select(is_small, constant(0.0), b.fmul(result, b.bitcast(bits, kind))))


@intrinsic
def largest(tc, address, count):  # type: ignore[no-untyped-def]
    """The largest of `count` float32; NaN is passed over."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        v, (begin, count) = Vectors(context, builder, 4), args
        lowest = ir.Constant(v.type, [float("-inf")] * v.lanes)
        best = cgutils.alloca_once_value(builder, lowest)
        with cgutils.for_range_slice(builder, v.number(0), count, v.number(v.lanes), I64) as (t, _):
            value = v.load_floats(builder.add(begin, builder.mul(t, v.number(4))))
            value = builder.select(_tail(v, t, count), value, lowest)
            before = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), best)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(F32, [v.type]), f"llvm.vector.reduce.fmax.v{v.lanes}f32"
        )
        return builder.call(function, [builder.load(best)])

    return types.float32(types.int64, types.int64), generate


@intrinsic
def exponentials(tc, address, count, top, scale):  # type: ignore[no-untyped-def]
    """Put exp((x - top) × scale) in the place of each of `count` float32, none above `top`; returns their sum."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        v, (begin, count, top, scale) = Vectors(context, builder, 4), args
        total = cgutils.alloca_once_value(builder, v.zero)
        tops, scales = v.splat(top), v.splat(scale)
        with cgutils.for_range_slice(builder, v.number(0), count, v.number(v.lanes), I64) as (t, _):
            place = builder.add(begin, builder.mul(t, v.number(4)))
            value = _exp(v, builder.fmul(builder.fsub(v.load_floats(place), tops), scales))
            value = builder.select(_tail(v, t, count), value, v.zero)
            v.store_floats(value, place)
            builder.store(builder.fadd(builder.load(total), value), total)
        return v.sum_lanes(builder.load(total))

    return types.float32(types.int64, types.int64, types.float32, types.float32), generate


@intrinsic
def load_operand_number(tc, address, index, element):  # type: ignore[no-untyped-def]
    """What `store_operand` has put there: float32, already rounded."""
    size = _length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.load(_operand_place(builder, arguments[0], arguments[1], lanes(context), size), typ=F32)

    return types.float32(address, index, element), generate
