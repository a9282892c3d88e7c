"""Matrix products of a few rows with a weight as it lies in memory, [out, in]: no copy, no packing.

Knows addresses; a sum runs across the lanes, and the lanes are added up once for each output. Four outputs share the
loads of a row of x, and up to four rows share the loads of the weight; more rows read it again from the nearest cache.
"""

from __future__ import annotations


from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.vectors import dot


@kernel
def linear(x, x_stride, num_rows, weight, count, begin, end, out, out_stride, element):  # type: ignore[no-untyped-def]
    """Outputs [begin, end) of rows x @ weight.T, float32.

    x: address of operands [num_rows, count]; weight: of elements [at least end, count]; out: of float32.
    Strides in bytes. count: a multiple of 32.
    """
    w_stride = count * len(element)
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
            dot(
                x + m * x_stride, x_stride, weight + n * w_stride, w_stride, count,
                out + m * out_stride + 4 * n, out_stride, (0,), (0,), element,
            )  # fmt: skip
        n += 1
