"""The last norm of many tokens, and logits of those that are asked for, on every thread, by the tile unit.

Knows addresses and sizes; knows nothing of modules and plans. Words are claimed in blocks, as outputs are in
`panel_step`.
"""

from __future__ import annotations

import numpy as np

from anaphora.runtime.kernels.barrier import begin_turn, claim, meet
from anaphora.runtime.kernels.code_layout import row_bytes
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.exponentials import soft_cap
from anaphora.runtime.kernels.panel_attention import copy_row
from anaphora.runtime.kernels.panel_products import GROUP_PANELS, multiply
from anaphora.runtime.kernels.panel_step import CONFIGURATION_BYTES, HIDDEN, NUM_TOKENS, OWN_BYTES, ROOM_BYTES
from anaphora.runtime.kernels.panels import add_panel_bias, normalise_panel, turn_operand, turn_to_rows
from anaphora.runtime.kernels.tiles import has_tiles, load_configuration, pack_rows, store_configuration
from anaphora.runtime.kernels.unpacking import row_stride, rows_of
from anaphora.runtime.kernels.vectors import fetch_lines

BLOCK_WORDS = 32
"""Of the vocabulary; one of fewer words is none for `run_head`."""


@kernel
def run_head(
    thread, num_threads, sizes, hidden, norm, eps, offset, normed, kept, num_kept, head, scales, bias, num_words, cap,
    logits, barrier, claims, own, configuration, codes,
):  # fmt: skip
    """The last norm of all tokens, and logits of some.

    hidden: as in run_layers. norm, head, scales, bias: addresses of weights; bias 0: none. normed: address of rows
    [panels × 16, hidden] for what the norm gives. kept: int64, where rows of `normed` begin, in bytes, of num_kept
    tokens, repeated up to a multiple of 16. cap: soft cap of logits, 0: none. logits: address of rows
    [num_kept, num_words]. codes: what the head's weights are, see code_layout.
    """
    size = sizes[HIDDEN]
    num_panels = (sizes[NUM_TOKENS] + 15) // 16
    saved = own + thread * sizes[OWN_BYTES]
    scratch = saved + CONFIGURATION_BYTES
    lines = scratch + 2 * 32 * 64
    room = lines + 16 * 2 * 32
    plain = room + sizes[ROOM_BYTES]
    stride, word_bytes = row_stride(size, codes), row_bytes(size, codes, (0, 0))
    if not has_tiles():
        return
    store_configuration(saved)
    load_configuration(configuration)
    begin_turn(claims, 0)
    todo = claim(claims, 0)
    while todo < num_panels:
        normalise_panel(hidden + todo * size * 32, norm, eps, offset, size, plain)
        turn_operand(plain, size, normed + todo * 16 * 2 * size, 2 * size)
        todo = claim(claims, 0)
    turn = 1
    for first in range(0, num_kept, 16 * GROUP_PANELS):
        if not meet(barrier, num_threads):
            return
        count = min(GROUP_PANELS, (num_kept - first + 15) // 16)
        for i in range(count):
            pack_rows(normed, kept + 8 * (first + 16 * i), size, plain + i * size * 32)
        begin_turn(claims, turn)
        todo = claim(claims, turn)
        while BLOCK_WORDS * todo < num_words:
            # The last block takes words of the one before it again, if it has not 32 of its own.
            n = min(BLOCK_WORDS * todo, num_words - BLOCK_WORDS)
            todo = claim(claims, turn)
            rows = rows_of(head, scales, n, BLOCK_WORDS, size, room, codes)
            fetch_lines(head + min(BLOCK_WORDS * todo, num_words - BLOCK_WORDS) * word_bytes, BLOCK_WORDS * word_bytes)
            for i in range(0, count, 2):
                pair = min(2, count - i)
                multiply(
                    rows, 16 * stride, stride, plain + i * size * 32, size * 32, size, scratch, 32 * 64, pair
                )  # fmt: skip
                for j in range(pair):
                    panel = scratch + j * 32 * 64
                    if bias != 0:
                        add_panel_bias(panel, bias + 2 * n, 32)
                    if cap != 0:
                        soft_cap(panel, 32 * 16, np.float32(1) / cap, cap)
                    turn_to_rows(panel, 32, lines, 64)
                    row = first + 16 * (i + j)
                    for t in range(min(16, num_kept - row)):
                        copy_row(lines + 64 * t, logits + ((row + t) * num_words + n) * 2, 32)
        turn += 1
    load_configuration(saved)
    meet(barrier, num_threads)
