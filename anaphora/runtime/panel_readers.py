"""Who attends to what in a step of panels: each sequence's keys, the panels that read them, and how that is cut up.

Knows attention calls and positions; knows nothing of weights and of the kernels' memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anaphora.core.ids import cdiv
from anaphora.runtime.attention import AttentionCall
from anaphora.runtime.kernels.panel_attention import CHUNK_TOKENS, SPAN_TOKENS
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
    num_results: that units leave apart, to be merged.
    """

    rows: Int64
    sequences: Int64
    items: Int64
    units: Int64
    merges: Int64
    visible: npt.NDArray[np.int32]
    most_items: int
    num_results: int


def find_readers(
    calls: tuple[AttentionCall, ...],
    positions: Int64,
    block_size: int,
    row_bytes: int,
    num_kv_heads: int,
    group: int,
    num_threads: int,
) -> Readers:
    """positions: of each token of the packed batch. row_bytes: of one token in a layer's pool. group: query heads of a
    K/V head."""
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
    units, merges = _cut(ends, items, num_kv_heads, group, num_threads)
    return Readers(
        rows=np.concatenate(rows),
        sequences=np.array(sequences, dtype=np.int64),
        items=np.array(items, dtype=np.int64),
        units=units,
        merges=merges,
        visible=np.stack(seen).astype(np.int32),
        most_items=int((units[:, 3] - units[:, 2]).max()),
        num_results=int((merges[:, 3] * (merges[:, 4] - 1) + merges[:, 2]).max(initial=-1)) + 1,
    )


def _cut(
    ends: list[int], items: list[tuple[int, int, int]], num_kv_heads: int, group: int, num_threads: int
) -> tuple[Int64, Int64]:
    """Units and merges. ends: of each sequence's items. group: query heads of a K/V head."""
    enough = UNITS_PER_THREAD * num_threads
    num_pieces = len(items) * num_kv_heads
    # Where there are so few items that heads alone do not occupy all threads, spans do.
    by_spans = num_pieces < enough
    longest = MOST_ITEMS if by_spans else min(MOST_ITEMS, num_pieces // enough)
    units: list[tuple[int, int, int, int, int, int, int]] = []
    merges: list[tuple[int, int, int, int, int]] = []
    work: list[int] = []
    place = 0
    for sequence, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        for first in range(begin, end, longest):
            last = min(first + longest, end)
            num_keys, num_results = items[last - 1][2], (last - first) * group
            num_spans = cdiv(num_keys, SPAN_TOKENS) if by_spans else 1
            for head in range(num_kv_heads):
                if num_spans == 1:
                    units.append((sequence, head, first, last, 0, num_keys, -1))
                    work.append(sum(most for _, _, most in items[first:last]))
                    continue
                for span in range(num_spans):
                    keys = span * SPAN_TOKENS, min((span + 1) * SPAN_TOKENS, num_keys)
                    units.append((sequence, head, first, last, *keys, place + span * num_results))
                    work.append((last - first) * (keys[1] - keys[0]))
                merges += [
                    (items[first + n // group][0], head * group + n % group, place + n, num_results, num_spans)
                    for n in range(num_results)
                ]
                place += num_spans * num_results
    order = np.argsort(-np.array(work), kind="stable")
    return np.array(units, dtype=np.int64)[order], np.array(merges, dtype=np.int64).reshape(-1, 5)
