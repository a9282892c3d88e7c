"""What adapters of low rank add to a linear part: two small products for each token that has one.

Knows addresses; must not know adapters' names or files. Matrices are float32, whatever the elements are, and so is the
sum with the part's own result: it is rounded once.

    x [tokens, count] @ down.T [count, rank] = narrow [tokens, rank] -> @ up [rank, outputs], added to the part's own
"""

from __future__ import annotations

import numpy as np

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.vectors import load_element

# Columns of the table, a row for each adapter: addresses of down [rank, count] and up [rank, outputs], and the rank,
# which is 0 where an adapter leaves the part as it is.
DOWN_MATRIX, UP_MATRIX, RANK = range(3)

# Linear parts of a layer, in the order of its table.
Q, K, V, O, GATE_PART, UP_PART, DOWN_PART = range(7)  # noqa: E741
NUM_PARTS = 7


@kernel
def narrow_rows(x, stride, count, table, adapters, narrow, element):
    """narrow[t, :rank] = x[t] @ down.T with the matrix of token t's adapter.

    x: address of rows of elements, `stride` bytes apart. table: int64 [num_adapters, 3]. adapters: int64 [tokens], -1
    for none. narrow: float32 [tokens, at least the largest rank].
    """
    single = (0, 0, 0, 0)
    for t in range(len(adapters)):
        if adapters[t] < 0:
            continue
        down, row = table[adapters[t], DOWN_MATRIX], x + t * stride
        for r in range(table[adapters[t], RANK]):
            total = np.float32(0)
            for i in range(count):
                total += load_element(row, i, element) * load_element(down + 4 * r * count, i, single)
            narrow[t, r] = total


@kernel
def add_low_rank(narrow, table, adapters, num_outputs, begin, end, wide, offset):
    """wide[t, offset + begin : offset + end] += (narrow[t] @ up)[begin:end]; num_outputs: of the whole part."""
    single = (0, 0, 0, 0)
    for t in range(len(adapters)):
        if adapters[t] < 0:
            continue
        up = table[adapters[t], UP_MATRIX]
        line = wide[t, offset:]
        for r in range(table[adapters[t], RANK]):
            factor = narrow[t, r]
            for n in range(begin, end):
                line[n] += factor * load_element(up + 4 * r * num_outputs, n, single)
