"""Who attends to what in a step of panels: each sequence's keys, the panels that read them, and how that is cut up.

Knows block tables, attention kinds and positions; knows nothing of weights and of the kernels' memory. Groups of one
kind differ only in where their keys lie.

    keys of a sequence    0 ...... 256 ...... 512 ...... 768 ..
    panel 40 .. 55 sees             [ 300 ........... 640 )          a window: rows from 256 on, and one unit from there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anaphora.core.groups import AttentionKind
from anaphora.core.ids import cdiv
from anaphora.runtime.attention import GroupInputs
from anaphora.runtime.kernels.panel_attention import CHUNK_TOKENS, END, FIRST, PANEL, SPAN_TOKENS
from anaphora.runtime.kernels.panels import PANEL_TOKENS

Int64 = npt.NDArray[np.int64]

MOST_ITEMS = 8
"""Of a unit, which brings a chunk's keys and values together once for all of its items."""

UNITS_PER_THREAD = 8
"""At least, where there are so many items: so that threads end at nearly the same time."""


@dataclass(frozen=True, slots=True)
class Heads:
    """of_keys: K/V heads. group: query heads of each one."""

    of_keys: int
    group: int


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads what; the arrays are those of kernels.panel_step.run_layers.

    units: of a group, those that take longest first.
    most_items: of one unit.
    num_results: that units leave apart, to be merged.
    """

    rows: Int64
    sequences: Int64
    items: Int64
    units: Int64
    merges: Int64
    parts: Int64
    visible: npt.NDArray[np.int32]
    most_items: int
    num_results: int


def find_readers(
    groups: Sequence[GroupInputs],
    kinds: Sequence[AttentionKind],
    positions: Int64,
    block_size: int,
    row_bytes: int,
    heads: Heads,
    num_threads: int,
) -> Readers:
    """positions: of each token of the packed batch. kinds: of the groups. row_bytes: of one token in a layer's pool."""
    patterns: dict[AttentionKind, _Pattern] = {}
    items = units = merges = 0
    for group, kind in zip(groups, kinds, strict=True):
        if kind not in patterns:
            pattern = _Pattern(group, kind, positions, block_size, heads, num_threads)
            pattern.first_item, pattern.first_unit, pattern.first_merge = items, units, merges
            pattern.units[:, 2:4] += items
            items, units, merges = items + len(pattern.items), units + len(pattern.units), merges + len(pattern.merges)
            patterns[kind] = pattern
    rows: list[Int64] = []
    sequences: list[Int64] = []
    num_rows = 0
    for group, kind in zip(groups, kinds, strict=True):
        pattern = patterns[kind]
        rows.append(
            (group.block_ids.ravel()[pattern.columns].astype(np.int64) * block_size + pattern.offsets) * row_bytes
        )
        sequences.append(pattern.sequences + num_rows)
        num_rows += len(rows[-1])
    each = list(patterns.values())
    all_units, all_merges = (
        np.concatenate(arrays) for arrays in zip(*((p.units, p.merges) for p in each), strict=True)
    )
    return Readers(
        rows=np.concatenate(rows),
        sequences=np.stack(sequences),
        items=np.concatenate([pattern.items for pattern in each]),
        units=all_units,
        merges=all_merges,
        parts=np.array([patterns[kind].part() for kind in kinds], dtype=np.int64),
        visible=np.concatenate([pattern.visible for pattern in each]).astype(np.int32),
        most_items=int((all_units[:, 3] - all_units[:, 2]).max()),
        num_results=int((all_merges[:, 3] * (all_merges[:, 4] - 1) + all_merges[:, 2]).max(initial=-1)) + 1,
    )


class _Pattern:
    """What is the same for all groups of one kind.

    columns, offsets: of each row, its block among the ids of all sequences, and its place there. sequences: as of
    Readers.
    """

    def __init__(
        self,
        group: GroupInputs,
        kind: AttentionKind,
        positions: Int64,
        block_size: int,
        heads: Heads,
        num_threads: int,
    ) -> None:
        self.first_item = self.first_unit = self.first_merge = 0
        seen_from = np.array([kind.first_visible(position) for position in positions.tolist()], dtype=np.int64)
        padding = (0, -len(positions) % PANEL_TOKENS)
        tokens = np.arange(len(positions) + padding[1]).reshape(-1, PANEL_TOKENS)
        firsts, ends = (np.pad(each, padding).reshape(tokens.shape) for each in (seen_from, positions + 1))
        keys: list[Int64] = []
        columns: list[Int64] = []
        sequences: list[int] = []
        items: list[Int64] = []
        visible: list[Int64] = []
        num_rows, most_blocks = 0, group.block_ids.shape[1]
        for number, span in enumerate(group.sequences):
            first, end = span.begin, span.begin + span.num_tokens
            begin, last = int(seen_from[first]), int(positions[end - 1])
            begin_row = begin // CHUNK_TOKENS * CHUNK_TOKENS
            # Before the first key that anyone sees stands its row, too, and behind the last one its.
            keys.append(np.arange(begin_row, (last // CHUNK_TOKENS + 1) * CHUNK_TOKENS).clip(begin, last))
            columns.append(keys[-1] // block_size + number * most_blocks)
            sequences.append(num_rows - begin_row)
            num_rows += len(keys[-1])
            panels = slice(first // PANEL_TOKENS, cdiv(end, PANEL_TOKENS))
            inside = (tokens[panels] >= first) & (tokens[panels] < end)
            seen = np.where(inside[:, None], np.stack([firsts[panels], ends[panels]], axis=1), 0)
            numbers = np.arange(panels.start, panels.stop)
            least = np.where(inside, firsts[panels], last).min(axis=1)
            items.append(np.stack([numbers, least, seen[:, 0].max(1), seen[:, 1].min(1), seen[:, 1].max(1)], axis=1))
            visible.append(seen)
        self.offsets = np.concatenate(keys) % block_size
        self.columns = np.concatenate(columns)
        self.sequences = np.array(sequences, dtype=np.int64)
        self.visible = np.concatenate(visible)
        self.items = np.concatenate(items)
        ends_of_items = np.cumsum([len(each) for each in items]).tolist()
        self.units, self.merges = _cut(ends_of_items, self.items.tolist(), heads, num_threads)

    def part(self) -> tuple[int, int, int, int]:
        end_unit, end_merge = self.first_unit + len(self.units), self.first_merge + len(self.merges)
        return self.first_unit, end_unit, self.first_merge, end_merge


def _cut(ends: list[int], items: list[list[int]], heads: Heads, num_threads: int) -> tuple[Int64, Int64]:
    """Units and merges. ends: of each sequence's items."""
    enough = UNITS_PER_THREAD * num_threads
    num_pieces = len(items) * heads.of_keys
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
            begin_key, end_key = items[first][FIRST] // CHUNK_TOKENS * CHUNK_TOKENS, items[last - 1][END]
            num_results = (last - first) * heads.group
            first_span = begin_key // SPAN_TOKENS
            num_spans = cdiv(end_key, SPAN_TOKENS) - first_span if by_spans else 1
            for head in range(heads.of_keys):
                if num_spans == 1:
                    units.append((sequence, head, first, last, begin_key, end_key, -1))
                    work.append(sum(item[END] - item[FIRST] for item in items[first:last]))
                    continue
                for span in range(num_spans):
                    keys = (first_span + span) * SPAN_TOKENS, (first_span + span + 1) * SPAN_TOKENS
                    keys = max(begin_key, keys[0]), min(keys[1], end_key)
                    units.append((sequence, head, first, last, *keys, place + span * num_results))
                    work.append((last - first) * (keys[1] - keys[0]))
                merges += [
                    (
                        items[first + n // heads.group][PANEL],
                        head * heads.group + n % heads.group,
                        place + n,
                        num_results,
                        num_spans,
                    )
                    for n in range(num_results)
                ]
                place += num_spans * num_results
    order = np.argsort(-np.array(work), kind="stable")
    return np.array(units, dtype=np.int64)[order], np.array(merges, dtype=np.int64).reshape(-1, 5)
