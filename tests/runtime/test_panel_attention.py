"""Claims: attention in panels is what formulas in float64 give, whatever a token sees, and a token's bits depend on
neither the other lanes of its panel nor on how the work is cut."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from test_kernel_attention import SCALE, SHAPES, Case, needs_tiles, request

from anaphora.core.groups import AttentionKind, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.runtime.inputs import build_inputs
from anaphora.runtime.kernels import tiles
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.panel_attention import attend_panels, chunk_bytes, merge_spans, result_bytes
from anaphora.runtime.kernels.panel_softmax import begin_panel, merge_panels, rescale_panel, soften
from anaphora.runtime.panel_readers import Heads, find_readers

pytestmark = needs_tiles

SHAPES = [*SHAPES, ([(511, 1), (505, 30)], 16), ([(1000, 40), (0, 1), (3, 700)], 16), ([(1020, 9)], 3)]


@kernel
def attend(
    units, merges, sequences, items, visible, queries, keys, values, rows, heads, kv_heads, scale, cap, sinks, room,
    results, partials, configuration, dim,
):  # type: ignore[no-untyped-def]  # fmt: skip
    tiles.load_configuration(configuration)
    for s, head, first, last, begin, end, place in units:
        attend_panels(
            queries, keys, values, rows + 8 * sequences[0, s], begin, end, items[first:last], visible + 128 * first,
            head, heads, kv_heads, scale, cap, sinks, room, partials + place * result_bytes(dim) if place >= 0 else
            results, place >= 0, dim,
        )  # fmt: skip
    for panel, head, first, apart, count in merges:
        query = queries + (panel * heads + head) * dim * 32
        size = result_bytes(dim)
        merge_spans(partials + first * size, apart * size, count, sinks, head, query, scale, dim)


def by_panels(case: Case, num_threads: int) -> torch.Tensor:
    """[tokens, heads, head_dim]; num_threads: how many the work is cut for."""
    dim, heads = case.head_dim, Heads(case.kv_heads, case.group)
    groups, row_bytes = case.inputs.groups, case.kv_heads * dim * 2
    readers = find_readers(groups, [case.kind], case.positions, case.block_size, row_bytes, heads, num_threads)
    num_tokens = len(case.query)
    padded = torch.zeros(-(-num_tokens // 16) * 16, case.heads, dim // 2, 2, dtype=torch.bfloat16)
    padded[:num_tokens] = case.query.view(num_tokens, case.heads, dim // 2, 2)
    queries = padded.view(-1, 16, case.heads, dim // 2, 2).permute(0, 2, 3, 1, 4).contiguous()
    size = result_bytes.py_func(dim)
    room = np.full(chunk_bytes(dim), 255, np.uint8)
    results = np.full(2 * readers.most_items * case.group * size, 255, np.uint8)
    partials = np.full(readers.num_results * size, 255, np.uint8)
    configuration = np.frombuffer(tiles.configuration(), dtype=np.uint8)
    attend(
        readers.units, readers.merges, readers.sequences, readers.items, readers.visible.ctypes.data,
        queries.data_ptr(), case.keys.data_ptr(), case.values.data_ptr(), readers.rows.ctypes.data, case.heads,
        case.kv_heads, np.float32(SCALE), np.float32(case.cap), 0 if case.sinks is None else case.sinks.data_ptr(),
        room.ctypes.data, results.ctypes.data, partials.ctypes.data, configuration.ctypes.data, dim,
    )  # fmt: skip
    return queries.permute(0, 3, 1, 2, 4).reshape(-1, case.heads, dim)[:num_tokens]


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize(("shapes", "block_size"), SHAPES)
@pytest.mark.parametrize("kind", [FullAttention(), *map(SlidingWindow, (1, 16, 100, 255, 530)), ChunkedAttention(100)])
def test_what_a_token_sees_is_all_that_counts(
    kind: AttentionKind, shapes: list[tuple[int, int]], block_size: int, num_threads: int
) -> None:
    case = Case(shapes, block_size, 64, 1, 4, torch.bfloat16, kind)
    case.check(by_panels(case, num_threads))


@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), [(32, 2, 1), (96, 1, 5), (128, 2, 2), (256, 1, 4)])
def test_heads_of_any_length(head_dim: int, kv_heads: int, group: int) -> None:
    case = Case(SHAPES[4][0], 16, head_dim, kv_heads, group, torch.bfloat16, SlidingWindow(130))
    case.check(by_panels(case, 2))


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize("kind", [FullAttention(), SlidingWindow(130)], ids=str)
@pytest.mark.parametrize(("cap", "with_sinks"), [(0.5, False), (50.0, False), (0.0, True), (3.0, True)])
def test_soft_caps_and_sinks(cap: float, with_sinks: bool, kind: AttentionKind, num_threads: int) -> None:
    sinks = torch.tensor([-30.0, 0.5, 3.0, 300.0]).to(torch.bfloat16) if with_sinks else None
    case = Case([(512, 24), (513, 1), (0, 9), (1020, 40)], 16, 64, 2, 2, torch.bfloat16, kind, cap, sinks)
    case.check(by_panels(case, num_threads))


@pytest.mark.parametrize("kind", [FullAttention(), SlidingWindow(130), SlidingWindow(700)], ids=str)
@pytest.mark.parametrize("start", [250, 508, 1020])
def test_a_lanes_bits_depend_on_no_other_lane_and_on_no_cut(kind: AttentionKind, start: int) -> None:
    """Others of the panel see keys of one more chunk or span: its sums are merged with those of no keys at all."""
    case = Case([(start, 12)], 16, 64, 1, 4, torch.bfloat16, kind)
    together = by_panels(case, 1)
    assert torch.equal(by_panels(case, 8), together)
    for count in range(1, 12):
        first = copy(case)
        first.inputs = build_inputs([request(start, count)], [0], case.tables, [kind], torch.float32)
        first.positions, first.query = case.positions[:count], case.query[:count].clone()
        assert torch.equal(by_panels(first, 8), together[:count])


@kernel
def join_nothing(panel, nothing, scores, seen, weights, dim):  # type: ignore[no-untyped-def]
    """A span of no keys, then a chunk that nobody sees."""
    begin_panel(nothing, dim, nothing + 64 * dim)
    merge_panels(panel, nothing, dim, np.float32(0.3))
    soften(scores, 0, 0, 0, 1, seen, np.float32(0.3), panel + 64 * dim, weights)
    rescale_panel(panel, dim, panel + 64 * dim + 128)


def test_what_adds_no_keys_changes_no_bit() -> None:
    dim, generator = 32, torch.Generator().manual_seed(0)
    panel = torch.rand(dim + 3, 16, generator=generator) + 0.5  # values, largest scores, sums, factors
    expected, nothing = panel.clone(), torch.empty_like(panel)
    scores, weights = torch.rand(32, 16, generator=generator), torch.empty(1024, dtype=torch.uint8)
    seen = torch.zeros(2, 16, dtype=torch.int32)
    join_nothing(
        panel.data_ptr(), nothing.data_ptr(), scores.data_ptr(), seen.data_ptr(), weights.data_ptr(), dim
    )  # fmt: skip
    assert torch.equal(panel[: dim + 2], expected[: dim + 2])
    assert torch.equal(weights, torch.zeros_like(weights))
