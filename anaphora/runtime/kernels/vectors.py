"""Pieces of LLVM code that Numba's own compiler does not find: wide vectors in registers, elements in memory.

Knows LLVM and the lanes of the CPU that it compiles for; knows nothing of models. Memory is addressed by integers: a
function's sizes that must be constants for the compiler arrive as the *length* of a tuple (`len` of its type), which
is part of the signature by which Numba files compiled code on disk.

Elements are bfloat16 (a tuple of 2, its bytes) or float32 (a tuple of 4). Operands are what they are multiplied with:

    float32     as it is
    bfloat16    as float32, in runs of 2 × lanes: the even ones, then the odd ones, which is how a register of bfloat16
                falls apart; what is left behind the last run is in order. (The CPU's own products of bfloat16 pairs,
                where it has them, are slower than this.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

LINE_BYTES = 64
"""Of a cache line, on every CPU that is worth the question."""


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

    def store_elements(self, value: Any, address: Any) -> None:
        """`lanes` float32, rounded to elements."""
        if self.element_bytes == 4:
            self.store_floats(value, address)
            return
        kind = ir.VectorType(I16, self.lanes)
        raw = rounded(self.builder, value, self.lanes)
        self.builder.store(raw, self.builder.inttoptr(address, kind.as_pointer())).align = 2

    def load_elements(self, address: Any) -> Any:
        """`lanes` elements as float32."""
        if self.element_bytes == 4:
            return self.load_floats(address)
        wide = ir.VectorType(I32, self.lanes)
        raw = self.builder.zext(self.load(address, ir.VectorType(I16, self.lanes), 2), wide)
        return self.builder.bitcast(self.builder.shl(raw, ir.Constant(wide, [16] * self.lanes)), self.type)

    def load_element(self, base: Any, index: Any) -> Any:
        """One element as float32."""
        b, place = self.builder, _place(self.builder, base, index, self.element_bytes)
        if self.element_bytes == 4:
            return b.load(place, typ=F32)
        return b.bitcast(b.shl(b.zext(b.load(place, typ=I16), I32), ir.Constant(I32, 16)), F32)

    def splat(self, scalar: Any) -> Any:
        undefined = ir.Constant(self.type, ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(
            single, undefined, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        )

    def splat_integer(self, number: Any) -> Any:
        """An int64 in every lane, as int32."""
        b = self.builder
        return b.bitcast(self.splat(b.bitcast(b.trunc(number, I32), F32)), ir.VectorType(I32, self.lanes))

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

    def fetch(self, address: Any) -> None:
        """Ask for the cache line at an address that is read soon; one that is not the process's own does no harm."""
        pointer = I8.as_pointer()
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32]), "llvm.prefetch.p0"
        )
        read, second_level, data = (ir.Constant(I32, number) for number in (0, 2, 1))
        self.builder.call(function, [self.builder.inttoptr(address, pointer), read, second_level, data])

    def constant(self, value: float) -> Any:
        return ir.Constant(self.type, [value] * self.lanes)

    def each(self, name: str, value: Any) -> Any:
        """LLVM's function `name` of each lane."""
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(self.type, [self.type]), f"llvm.{name}.v{self.lanes}f32"
        )
        return self.builder.call(function, [value])

    def before(self, count: Any) -> Any:
        """Which lanes have a number below `count` (int64)."""
        kind = ir.VectorType(I64, self.lanes)
        undefined, zeros = (
            ir.Constant(kind, ir.Undefined),
            ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes),
        )
        limit = self.builder.insert_element(undefined, count, ir.Constant(I32, 0))
        numbers = ir.Constant(kind, list(range(self.lanes)))
        return self.builder.icmp_signed("<", numbers, self.builder.shuffle_vector(limit, undefined, zeros))

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


def rounded(builder: Any, value: Any, num_lanes: int | None = None) -> Any:
    """float32 (or a vector of them) -> the upper 16 bits of the nearest bfloat16, ties to even; NaN stays NaN."""

    def kind(scalar: Any) -> Any:
        return scalar if num_lanes is None else ir.VectorType(scalar, num_lanes)

    def constant(number: int) -> Any:
        return ir.Constant(kind(I32), number if num_lanes is None else [number] * num_lanes)

    bits = builder.bitcast(value, kind(I32))
    upper = builder.lshr(bits, constant(16))
    half = builder.add(constant(0x7FFF), builder.and_(upper, constant(1)))
    up = builder.lshr(builder.add(bits, half), constant(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, builder.or_(upper, constant(0x40)), up), kind(I16))


def length(kind: Any) -> int:
    return len(kind)


@contextmanager
def each_group(v: Vectors, count: Any, size: int) -> Iterator[Any]:
    """A loop over the groups of `count` numbers: the number of each."""
    groups = v.builder.sdiv(count, v.number(size))
    with cgutils.for_range_slice(v.builder, v.number(0), groups, v.number(1), I64) as (group, _):
        yield group


def void(build: Callable[[Vectors, Any, tuple[int, ...]], None], signature: Any, sizes: tuple[int, ...]) -> Any:
    """An intrinsic without result: `build(vectors, arguments, sizes)`, the last size being the element's bytes."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        build(Vectors(context, builder, sizes[-1]), arguments, sizes)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fetch_lines(tc, address, num_bytes):
    """Ask for memory that is read soon, while there is something to wait for."""

    def build(v: Vectors, arguments: Any, _: tuple[int, ...]) -> None:
        address, num_bytes = arguments
        with cgutils.for_range_slice(v.builder, v.number(0), num_bytes, v.number(LINE_BYTES), I64) as (offset, _):
            v.fetch(v.builder.add(address, offset))

    return void(build, types.void(address, num_bytes), (4,))


@intrinsic
def num_lanes(tc):
    """Tokens that one `score` takes."""
    return types.int64(), lambda context, builder, _, args: ir.Constant(I64, lanes(context))


def _place(builder: Any, base: Any, index: Any, element_bytes: int) -> Any:
    # An index into an array, rather than an address of its own: so LLVM sees that a loop goes on evenly.
    kind = I16 if element_bytes == 2 else F32
    return builder.gep(builder.inttoptr(base, kind.as_pointer()), [index], source_etype=kind)


@intrinsic
def load_element(tc, base, index, element):
    """Element number `index` at `base`, as float32."""
    size = length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return Vectors(context, builder, size).load_element(arguments[0], arguments[1])

    return types.float32(types.int64, types.int64, element), generate


@intrinsic
def store_element(tc, base, index, value, element):
    size = length(element)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        value = arguments[2] if size == 4 else rounded(builder, arguments[2])
        builder.store(value, _place(builder, arguments[0], arguments[1], size))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, element), generate


@intrinsic
def address_of(tc, array):
    """Where an array's data begin."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)

    return types.int64(array), generate
