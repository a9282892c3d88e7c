"""How a weight of codes lies in memory: whole numbers in groups of 32 inputs that share a scale, or scale and minimum.

Knows LLVM and bytes; knows nothing of products. Sixteen outputs lie side by side, so that a register holds four inputs
of each and every output's sum stays in its lane:

    codes   [outputs / 16, inputs / 32, vectors, 16 outputs, 4 bytes]
            8 bits: 8 vectors, 0 to 255 stand for -128 to 127; vector j has the inputs 4 j to 4 j + 3
            4 bits: 4 vectors, 0 to 15; the low halves of vector j have the inputs 4 j to 4 j + 3, the high ones 16 more
    scales  [outputs / 16, inputs / 32, 1 or 2, 16] float16: of 8 bits the scale, of 4 bits the scale and the minimum

`codes`, an argument of many kernels, is a tuple of as many as a code has half bytes; empty where there are elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.vectors import I32, Vectors

GROUP = 32
BLOCK = 16
PANEL_OUTPUTS = 2 * BLOCK

_HALF = ir.HalfType()


def panel_bytes(count: int) -> int:
    """Room for the `count` inputs of PANEL_OUTPUTS outputs as bfloat16."""
    return PANEL_OUTPUTS * count * 2


@kernel
def row_bytes(count, codes, element):
    """Of a weight: what `count` inputs of one output take."""
    if len(codes) == 0:
        return count * len(element)
    return count * len(codes) // 2


@kernel
def scale_bytes(count, codes):
    """Of a weight of codes: what the scales of `count` inputs of one output take."""
    return count // GROUP * (4 if len(codes) == 1 else 2)


class Codes:
    """Builds code that reads groups of 16 outputs. sides: how many numbers of float16 an output's group has."""

    def __init__(self, v: Vectors, num_halves: int) -> None:
        self.v = v
        self.bits = 4 * num_halves
        self.sides = 2 if self.bits == 4 else 1
        self.group_bytes = self.bits * 4 * BLOCK
        self.side_bytes = self.sides * 2 * BLOCK

    def load_sides(self, address: Any, first: int = 0) -> list[Any]:
        """Scales of `lanes` outputs from number `first` on as float32, and minima if there are any."""
        kind, step = ir.VectorType(_HALF, self.v.lanes), 2 * BLOCK
        places = [self.v.at(address, step * number + 2 * first) for number in range(self.sides)]
        return [self.v.builder.fpext(self.v.load(place, kind, 2), self.v.type) for place in places]

    def load_bytes(self, address: Any, first: int = 0, count: int = BLOCK) -> list[Any]:
        """Codes of `count` outputs, one in each byte: a vector of int32 for every four inputs, in their order."""
        b, kind = self.v.builder, ir.VectorType(I32, count)
        raw = [self.v.load(self.v.at(address, 4 * (BLOCK * j + first)), kind, 4) for j in range(self.bits)]
        if self.bits == 8:
            return raw
        mask, shift = ir.Constant(kind, [0x0F0F0F0F] * count), ir.Constant(kind, [4] * count)
        return [b.and_(one, mask) for one in raw] + [b.and_(b.lshr(one, shift), mask) for one in raw]

    def floats(self, four: Any) -> list[Any]:
        """`lanes` outputs of each of the four inputs of a vector, as float32."""
        b, kind = self.v.builder, ir.VectorType(I32, self.v.lanes)
        mask = ir.Constant(kind, [255] * self.v.lanes)
        shifted = [b.lshr(four, ir.Constant(kind, [8 * i] * self.v.lanes)) if i else four for i in range(4)]
        return [b.sitofp(b.and_(one, mask), self.v.type) for one in shifted]

    def minima(self, sides: list[Any]) -> Any:
        """What the code 0 stands for."""
        return sides[1] if self.bits == 4 else self.v.builder.fmul(sides[0], self.v.constant(-128.0))
