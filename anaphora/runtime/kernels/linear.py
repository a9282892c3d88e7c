"""Matrix products of a few rows with a weight as it lies in memory, [out, in]: no copy of the weights, no packing.

Knows addresses and which of two ways a CPU has: tiles, or vectors. In vectors a sum runs across the lanes, and the
lanes are added up once for each output; four outputs share the loads of a row of x, and up to four rows share the loads
of the weight; more rows read it again from the nearest cache.
"""

from __future__ import annotations

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.products import dot, spread
from anaphora.runtime.kernels.tiles import has_tiles, multiply_tiles_transposed, pack


@kernel
def prepare(source, stride, num_rows, count, out, use_tiles, element):
    """Make operands for `linear` of rows of elements.

    source: address of rows, `stride` bytes apart; with tiles, rows up to a multiple of 16 are read, whatever they hold.
    out: room for 4 × count bytes for each of these rows.
    """
    if use_tiles and has_tiles():
        for m in range(0, num_rows, 16):
            pack(source + m * stride, stride, count, out + m * count * 2)
    else:
        for m in range(num_rows):
            spread(source + m * stride, out + m * count * 4, count, element)


@kernel
def linear(x, num_rows, weight, count, begin, end, out, out_stride, scratch, use_tiles, element):
    """Outputs [begin, end) of rows x @ weight.T, float32.

    x: address of operands [num_rows, count] from `prepare`; weight: of elements [at least end, count]; out: of float32,
    its stride in bytes; with tiles, rows up to a multiple of 16 are written. scratch: see tiles.
    """
    if use_tiles and has_tiles():
        tile_linear(x, num_rows, weight, count, begin, end, out, out_stride, scratch)
    else:
        vector_linear(x, num_rows, weight, count, begin, end, out, out_stride, element)


@kernel
def tile_linear(x, num_rows, weight, count, begin, end, out, out_stride, scratch):
    stride, one, two = 2 * count, (0,), (0, 0)
    n = begin
    while n < end:
        # The last outputs of an odd number are computed with some of those before them once more.
        if end - n < 16:
            n = end - 16
        w = weight + n * stride
        # Rows of a tile lie far apart, which the CPU does not foresee. Behind the last ones nothing is asked for.
        ahead = w + 32 * stride if end - n >= 64 else w
        m = 0
        while m < num_rows:
            source, target = x + m * stride, out + m * out_stride + 4 * n
            if num_rows - m > 16:
                if end - n >= 32:
                    multiply_tiles_transposed(w, stride, source, count, target, out_stride, scratch, ahead, two, two)
                else:
                    multiply_tiles_transposed(w, stride, source, count, target, out_stride, scratch, ahead, one, two)
                m += 32
            else:
                if end - n >= 32:
                    multiply_tiles_transposed(w, stride, source, count, target, out_stride, scratch, ahead, two, one)
                else:
                    multiply_tiles_transposed(w, stride, source, count, target, out_stride, scratch, ahead, one, one)
                m += 16
            ahead = w  # asked for already
        n += 32 if end - n >= 32 else 16


@kernel
def vector_linear(x, num_rows, weight, count, begin, end, out, out_stride, element):
    w_stride, x_stride = count * len(element), 4 * count
    n = begin
    while n + 4 <= end:
        w = weight + n * w_stride
        m = 0
        while m < num_rows:
            source, target = x + m * x_stride, out + m * out_stride + 4 * n
            left = num_rows - m
            if left >= 4:
                dot(source, x_stride, w, w_stride, count, target, out_stride, (0, 0, 0, 0), (0, 0, 0, 0), element)
            elif left == 3:
                dot(source, x_stride, w, w_stride, count, target, out_stride, (0, 0, 0), (0, 0, 0, 0), element)
            elif left == 2:
                dot(source, x_stride, w, w_stride, count, target, out_stride, (0, 0), (0, 0, 0, 0), element)
            else:
                dot(source, x_stride, w, w_stride, count, target, out_stride, (0,), (0, 0, 0, 0), element)
            m += 4
        n += 4
    while n < end:
        for m in range(num_rows):
            target = out + m * out_stride + 4 * n
            dot(
                x + m * x_stride, x_stride, weight + n * w_stride, w_stride, count, target, out_stride,
                (0,), (0,), element,
            )  # fmt: skip
        n += 1
