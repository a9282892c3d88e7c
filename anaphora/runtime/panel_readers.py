"""Who attends to what in a step of panels: each sequence's keys, the panels that read them, and how that is cut up.

Knows attention calls and positions; knows nothing of weights and of the kernels' memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anaphora.core.ids import cdiv
from anaphora.runtime.attention import AttentionCall
from anaphora.runtime.kernels.panel_attention import CHUNK_TOKENS
from anaphora.runtime.kernels.panels import PANEL_TOKENS

Int64 = npt.NDArray[np.int64]

MOST_ITEMS = 8
"""Of a unit, which brings a chunk's keys and values together once for all of its items."""

UNITS_PER_THREAD = 8
"""At least, where there are so many items: so that threads end at nearly the same time."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads what, for all layers alike; the arrays are those of kernels.panel_step.run_layers.

    units: those that take longest first.
    most_items: of one unit.
    """

    rows: Int64
    sequences: Int64
    items: Int64
    units: Int64
    visible: npt.NDArray[np.int32]
    most_items: int


def find_readers(
    calls: tuple[AttentionCall, ...],
    positions: Int64,
    block_size: int,
    row_bytes: int,
    num_kv_heads: int,
    num_threads: int,
) -> Readers:
    """positions: of each token of the packed batch. row_bytes: of one token in a layer's pool."""
    padded = np.append(positions, np.full(-len(positions) % PANEL_TOKENS, -1)).reshape(-1, PANEL_TOKENS)
    tokens = np.arange(padded.size).reshape(padded.shape)
    rows: list[Int64] = []
    sequences: list[tuple[int, int]] = []
    items: list[tuple[int, int, int]] = []
    seen: list[Int64] = []
    ends: list[int] = []  # of each sequence's items
    num_rows = 0
    for call in calls:
        length = (call.end - call.begin) // call.num_seqs
        tables = call.block_ids.numpy().reshape(call.num_seqs, -1).astype(np.int64)
        for table, first in zip(tables, range(call.begin, call.end, length), strict=True):
            end = first + length
            num_keys = int(positions[end - 1]) + 1
            slots = (table[: cdiv(num_keys, block_size), None] * block_size + np.arange(block_size)).ravel()[:num_keys]
            rows.append(np.pad(slots, (0, -num_keys % CHUNK_TOKENS), mode="edge") * row_bytes)
            for panel in range(first // PANEL_TOKENS, cdiv(end, PANEL_TOKENS)):
                inside = (tokens[panel] >= first) & (tokens[panel] < end)
                counts = np.where(inside, padded[panel] + 1, 0)
                items.append((panel, int(counts.min()), int(counts.max())))
                seen.append(counts)
            ends.append(len(items))
            sequences.append((num_rows, num_keys))
            num_rows += len(rows[-1])
    units = _cut(ends, [most for _, _, most in items], num_kv_heads, num_threads)
    return Readers(
        rows=np.concatenate(rows),
        sequences=np.array(sequences, dtype=np.int64),
        items=np.array(items, dtype=np.int64),
        units=units,
        visible=np.stack(seen).astype(np.int32),
        most_items=int((units[:, 3] - units[:, 2]).max()),
    )


def _cut(ends: list[int], num_keys: list[int], num_kv_heads: int, num_threads: int) -> Int64:
    """Units [m, 4]: a sequence, a K/V head and a run of the sequence's items.

    ends: of each sequence's items. num_keys: that each item reads.
    """
    longest = min(MOST_ITEMS, max(1, len(num_keys) * num_kv_heads // (UNITS_PER_THREAD * num_threads)))
    units: list[tuple[int, int, int, int]] = []
    work: list[int] = []
    for sequence, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        for first in range(begin, end, longest):
            last = min(first + longest, end)
            units += [(sequence, head, first, last) for head in range(num_kv_heads)]
            work += [sum(num_keys[first:last])] * num_kv_heads
    order = np.argsort(-np.array(work), kind="stable")
    return np.array(units, dtype=np.int64)[order]
