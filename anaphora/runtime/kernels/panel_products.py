"""Products of panels whose outputs are added to hidden states, shared out among threads by claims.

Knows addresses and sizes; knows nothing of layers.
"""

from __future__ import annotations

from anaphora.runtime.kernels.barrier import begin_turn, claim
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.panel_adapters import add_adapters
from anaphora.runtime.kernels.panels import add_normalised_panel, add_panel_bias, add_to_panel, multiply_panels
from anaphora.runtime.kernels.unpacking import row_stride, rows_of

GROUP_PANELS = 16


@kernel
def multiply(first, across, stride, operand, operand_bytes, count, out, out_bytes, num_panels):
    """See multiply_panels; `across`: bytes from `first` to `second`."""
    if num_panels == 2:
        multiply_panels(first, first + across, stride, operand, operand_bytes, count, out, out_bytes, (0, 0))
    else:
        multiply_panels(first, first + across, stride, operand, operand_bytes, count, out, out_bytes, (0,))


@kernel
def project(
    weight, scales, bias, size, operand, count, hidden, first_panel, num_panels, wide, is_normalised, ups, low_rank,
    scratch, room, claims, turn, codes,
):  # fmt: skip
    """hidden += weight [size, count] × operand + bias, for the outputs that this thread gets.

    first_panel: the step's number of the first panel. ups, low_rank: see add_adapters.
    is_normalised: not 0 if they go to `wide` instead, panels of float32 [size].
    """
    stride = row_stride(count, codes)
    begin_turn(claims, turn)
    todo = claim(claims, turn)
    while todo < size // 32:
        n = 32 * todo
        rows = rows_of(weight, scales, n, 32, count, room, codes)
        todo = claim(claims, turn)
        for i in range(0, num_panels, 2):
            pair = min(2, num_panels - i)
            out, out_bytes = scratch, 32 * 64
            if is_normalised != 0:
                out, out_bytes = wide + (i * size + n) * 64, size * 64
            multiply(
                rows, 16 * stride, stride, operand + i * count * 32, count * 32, count, out, out_bytes, pair
            )  # fmt: skip
            for j in range(pair):
                panel = out + j * out_bytes
                if len(ups) > 0:
                    add_adapters(ups, low_rank, first_panel + i + j, n, 32, panel)
                if bias != 0:
                    add_panel_bias(panel, bias + 2 * n, 32)
                if is_normalised == 0:
                    add_to_panel(hidden + (i + j) * size * 32 + n * 32, panel, 32)


@kernel
def add_normalised(hidden, wide, norm, eps, offset, size, num_panels, claims, turn):
    """hidden += RMS norm of what `project` left in `wide`, for the panels that this thread gets."""
    begin_turn(claims, turn)
    todo = claim(claims, turn)
    while todo < num_panels:
        add_normalised_panel(hidden + todo * size * 32, wide + todo * size * 64, norm, eps, offset, size)
        todo = claim(claims, turn)
