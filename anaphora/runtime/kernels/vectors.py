"""Pieces of LLVM code that Numba's own compiler does not find: wide vectors in registers, products of bfloat16.

Knows LLVM and the lanes of the CPU that it compiles for; knows nothing of models. Memory is addressed by integers: a
function's sizes that must be constants for the compiler arrive as the *length* of a tuple (`len` of its type), which
is part of the signature by which Numba files compiled code on disk.

Elements are bfloat16 (tuple of 2: bytes) or float32 (tuple of 4). Operands are what elements are multiplied with:

    float32                            as it is
    bfloat16, CPU multiplies it        as it is
    bfloat16, other CPUs               float32, in runs of 2 × lanes: the even ones, then the odd ones
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


class _BFloat(ir.types._BaseFloatType):
    """llvmlite has no name for it."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: float) -> str:
        raise NotImplementedError


BF16 = _BFloat()


def features(context: Any) -> str:
    """What the CPU that code is made for can do; Numba files compiled code by it."""
    return str(context.codegen()._tm_features)


def lanes(context: Any) -> int:
    """float32 numbers in one register."""
    found = features(context)
    return 16 if "+avx512f" in found and "+avx512bw" in found else 8


def multiplies_bfloat16(context: Any) -> bool:
    found = features(context)
    return "+avx512bf16" in found and lanes(context) == 16


class Vectors:
    """Builds code for vectors of one element type."""

    def __init__(self, context: Any, builder: Any, element_bytes: int) -> None:
        self.builder = builder
        self.lanes = lanes(context)
        self.element_bytes = element_bytes
        self.is_direct = element_bytes == 2 and multiplies_bfloat16(context)
        self.type = ir.VectorType(F32, self.lanes)
        self.zero = ir.Constant(self.type, [0.0] * self.lanes)
        self.per_step = self.lanes if element_bytes == 4 else 2 * self.lanes
        """Elements that one `multiply` takes."""
        self.operand_bytes = 2 if self.is_direct else 4

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
        if self.is_direct:
            return (self.load(address, ir.VectorType(BF16, 2 * self.lanes), 2),)
        wide = ir.VectorType(I32, self.lanes)
        pairs = self.load(address, wide, 2)
        even = self.builder.shl(pairs, ir.Constant(wide, [16] * self.lanes))
        odd = self.builder.and_(pairs, ir.Constant(wide, [-65536] * self.lanes))
        return self.builder.bitcast(even, self.type), self.builder.bitcast(odd, self.type)

    def load_operand(self, address: Any) -> tuple[Any, ...]:
        """What `per_step` elements are multiplied with."""
        if self.element_bytes == 4:
            return (self.load_floats(address),)
        if self.is_direct:
            return (self.load(address, ir.VectorType(BF16, 2 * self.lanes), 2),)
        return self.load_floats(address), self.load_floats(self.at(address, 4 * self.lanes))

    def multiply(self, elements: tuple[Any, ...], operand: tuple[Any, ...], total: Any) -> Any:
        """total + products, lane by lane (in pairs, for bfloat16)."""
        if self.is_direct:
            pairs = ir.VectorType(BF16, 2 * self.lanes)
            function = cgutils.get_or_insert_function(
                self.builder.module,
                ir.FunctionType(self.type, [self.type, pairs, pairs]),
                "llvm.x86.avx512bf16.dpbf16ps.512",
            )
            return self.builder.call(function, [total, elements[0], operand[0]])
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
        x_offset = b.mul(k, v.number(v.operand_bytes))
        elements = [v.load_step(b.add(address, w_offset)) for address in ws]
        for i, address in enumerate(xs):
            operand = v.load_operand(b.add(address, x_offset))
            for j in range(num_w):
                total = totals[i * num_w + j]
                b.store(v.multiply(elements[j], operand, b.load(total)), total)
    for i in range(num_x):
        row = b.add(out, b.mul(out_stride, v.number(i)))
        for j in range(num_w):
            target = b.inttoptr(v.at(row, 4 * j), F32.as_pointer())
            b.store(v.sum_lanes(b.load(totals[i * num_w + j])), target)


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
    operands = [v.load_operand(v.at(query, i * v.per_step * v.operand_bytes)) for i in range(steps)]
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


@intrinsic
def store_operand(tc, address, index, value, element):  # type: ignore[no-untyped-def]
    """Put number `index` of an operand at `address`, rounded as an element is."""
    size = _length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        base, index, value = arguments[:3]
        n = lanes(context)

        def target(kind: Any, position: Any) -> Any:
            offset = builder.mul(position, ir.Constant(I64, 2 if kind is I16 else 4))
            return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

        if size == 4:
            builder.store(value, target(F32, index))
        elif multiplies_bfloat16(context):
            builder.store(_rounded(builder, value), target(I16, index))
        else:
            half = builder.lshr(builder.and_(index, ir.Constant(I64, 2 * n - 1)), ir.Constant(I64, 1))
            odd = builder.mul(builder.and_(index, ir.Constant(I64, 1)), ir.Constant(I64, n))
            run = builder.and_(index, ir.Constant(I64, -2 * n))
            wide = builder.shl(builder.zext(_rounded(builder, value), I32), ir.Constant(I32, 16))
            builder.store(builder.bitcast(wide, F32), target(F32, builder.add(run, builder.add(odd, half))))
        return context.get_dummy_value()

    return types.void(address, index, types.float32, element), generate


@intrinsic
def float_of_bits(tc, bits):  # type: ignore[no-untyped-def]
    """The float32 of these bits (int32)."""
    return types.float32(types.int32), lambda context, builder, _, args: builder.bitcast(args[0], F32)


@intrinsic
def address_of(tc, array):  # type: ignore[no-untyped-def]
    """Where an array's data begin."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)

    return types.int64(array), generate
