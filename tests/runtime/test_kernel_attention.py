"""Claims: the kernels' attention is what formulas in float64 give, whatever a token sees; shared keys are read once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from anaphora.core.groups import AttentionKind, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.core.ids import RequestId, TokenId
from anaphora.core.plan import ScheduledRequest
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.chunks import Chunks, cut_into_chunks
from anaphora.runtime.cpu_step import tiles_allowed
from anaphora.runtime.inputs import StepInputs, build_inputs
from anaphora.runtime.kernels import attention, sharing, step, tile_attention, tiles
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.products import spread

CPU = torch.device("cpu")
HAS_TILES = bool(step.has_tile_unit()) and tiles_allowed()
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="no tile unit")
WAYS = [
    pytest.param(torch.float32, False, id="float32"),
    pytest.param(torch.bfloat16, False, id="bfloat16"),
    pytest.param(torch.bfloat16, True, id="tiles", marks=needs_tiles),
]
SHAPES = [
    ([(0, 1)], 16),
    ([(15, 1), (16, 1), (17, 1)], 16),
    ([(255, 1), (256, 1), (511, 1), (512, 1), (0, 1), (3, 1), (700, 1), (31, 1)], 16),
    ([(300, 1), (290, 1)], 16),  # a shared beginning
    ([(512, 24), (513, 1), (0, 9), (250, 12)], 16),
    ([(77, 5), (90, 1), (254, 3)], 3),
    ([(40, 20)], 1),
    ([(600, 13), (128, 2)], 64),
    ([(530 + 7 * i, 1) for i in range(16)], 16),  # many sharers, each further on than the one before
]
SCALE = 0.2


@kernel
def spread_heads(source, out, num_heads, dim, element):  # type: ignore[no-untyped-def]
    for head in range(num_heads):
        spread(source + head * dim * len(element), out + head * dim * 4, dim, element)


@kernel
def merge_all(slots, num_tokens, num_heads, dim, scale, sinks, tops, sums, partials, out, element):  # type: ignore[no-untyped-def]
    for t in range(num_tokens):
        for head in range(num_heads):
            place = out + (t * num_heads + head) * dim * len(element)
            attention.merge(slots[t], slots[t + 1], head, scale, sinks, tops, sums, partials, place, dim, element)


@kernel
def find(keys, rows, row_bytes, dim, count, copied, table):  # type: ignore[no-untyped-def]
    tile_attention.find_keys(keys, rows, row_bytes, dim, count, copied, table)


@kernel
def configure(address):  # type: ignore[no-untyped-def]
    tiles.load_configuration(address)


def request(start: int, n: int) -> ScheduledRequest:
    return ScheduledRequest(RequestId("r"), start, tuple(TokenId(100 + i) for i in range(n)), (), True)


def sequences(
    generator: torch.Generator, shapes: list[tuple[int, int]], block_size: int, kind: AttentionKind
) -> tuple[StepInputs, BlockTables]:
    """Block tables in random order: a tree, in which each sequence shares what full blocks it can with its parent."""
    width = max(-(-(start + n) // block_size) for start, n in shapes)
    tables = BlockTables(1, len(shapes), width * block_size, block_size, CPU)
    free = (1 + torch.randperm(len(shapes) * width, generator=generator)).tolist()
    for row, (start, n) in enumerate(shapes):
        parent = (row - 1) // 2
        shared = tables.ids[0, parent, : min(shapes[parent][0], start) // block_size].tolist() if row else []
        need = -(-(start + n) // block_size) - len(shared)
        tables.append([(row, [[*shared, *[free.pop() for _ in range(need)]]])])
    rows = list(range(len(shapes)))
    return build_inputs([request(*shape) for shape in shapes], rows, tables, [kind], torch.float32), tables


@dataclass
class Case:
    """Random queries, keys and values for a step; nobody sees what is NaN."""

    shapes: list[tuple[int, int]]
    block_size: int
    head_dim: int
    kv_heads: int
    group: int
    dtype: torch.dtype
    kind: AttentionKind
    cap: float = 0.0
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.head_dim + self.group)
        self.inputs, self.tables = sequences(generator, self.shapes, self.block_size, self.kind)
        tables = self.tables
        self.positions = self.inputs.position_ids[0].numpy()
        num_slots = (int(tables.ids.max()) + 1) * self.block_size
        self.keys = torch.full((num_slots, self.kv_heads, self.head_dim), torch.nan, dtype=self.dtype)
        self.values = self.keys.clone()
        self.heads = self.kv_heads * self.group
        size = (len(self.positions), self.heads, self.head_dim)
        self.query = torch.randn(size, generator=generator).to(self.dtype)
        self.seen: list[torch.Tensor] = []  # of each token, the slots of what it sees
        for span in self.inputs.sequences:
            for position in range(span.start, span.start + span.num_tokens):
                at = torch.arange(self.kind.first_visible(position), position + 1)
                slots = tables.ids[0, span.row][at // self.block_size].long() * self.block_size + at % self.block_size
                self.seen.append(slots)
        slots = torch.cat(self.seen).unique()
        for pool in (self.keys, self.values):
            pool[slots] = torch.randn(len(slots), *pool.shape[1:], generator=generator).to(self.dtype)

    def alone(self, number: int) -> Case:
        """The same keys and values with one query, of the sequence that stands there in the packed batch."""
        span, case = self.inputs.sequences[number], copy(self)
        case.inputs = build_inputs([request(span.start, 1)], [span.row], self.tables, [self.kind], torch.float32)
        case.positions = case.inputs.position_ids[0].numpy()
        case.query = self.query[number : number + 1].clone()
        return case

    def chunks(self) -> Chunks:
        return cut_into_chunks(self.inputs.groups, [self.kind], self.positions, self.block_size, attention.CHUNK_TOKENS)

    def attend(self, use_tiles: bool) -> torch.Tensor:
        """[tokens, heads, head_dim] by the kernels."""
        chunks = self.chunks()
        operands = np.zeros(self.query.numel(), np.float32)
        element, dims = (0,) * self.dtype.itemsize, (0,) * (self.head_dim // 16)
        spread_heads(self.query.data_ptr(), operands.ctypes.data, self.query[..., 0].numel(), self.head_dim, element)
        rows = chunks.slots * (self.kv_heads * self.head_dim * self.dtype.itemsize)
        count = int(chunks.token_partials[0, -1])
        tops, sums = (np.zeros((count, self.heads), np.float32) for _ in range(2))
        partials = np.zeros((count, self.heads, self.head_dim), np.float32)
        scores = np.zeros(self.group * attention.CHUNK_TOKENS, np.float32)
        room = np.zeros(tile_attention.tile_bytes(self.head_dim), np.uint8)
        if use_tiles:
            configuration = np.frombuffer(tiles.configuration(), dtype=np.uint8)
            configure(configuration.ctypes.data)
        for item, (begin, end) in enumerate(chunks.items):
            common = (self.keys.data_ptr(), self.values.data_ptr(), rows[item].ctypes.data)
            arrays = (chunks.tokens, chunks.first, chunks.visible, chunks.partials)
            readers = tuple(array[begin:end] for array in arrays)
            sizes = (self.heads, self.kv_heads, np.float32(SCALE), np.float32(self.cap))
            results = (tops, sums, partials, dims, element)
            if use_tiles:
                ahead = (rows[-1].ctypes.data, 0)  # what is asked for meanwhile changes nothing
                for head in range(self.kv_heads):
                    tile_attention.attend_head_by_tiles(
                        self.query.data_ptr(), *common, *readers, head, *ahead, *sizes, room.ctypes.data, *results[:-1]
                    )
            else:
                heads = (0, self.kv_heads)
                attention.attend_chunk(operands.ctypes.data, *common, *readers, *heads, *sizes, scores, *results)
        out = torch.empty_like(self.query)
        sinks = 0 if self.sinks is None else self.sinks.data_ptr()
        sizes = (len(self.positions), self.heads, self.head_dim, np.float32(SCALE))
        merge_all(chunks.token_partials[0], *sizes, sinks, tops, sums, partials, out.data_ptr(), element)
        return out

    def check(self, out: torch.Tensor) -> None:
        for t, slots in enumerate(self.seen):
            k, v = (pool[slots].double().repeat_interleave(self.group, dim=1) for pool in (self.keys, self.values))
            scores = torch.einsum("hd,thd->ht", self.query[t].double(), k) * SCALE
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double().unsqueeze(1)], dim=1)
            expected = torch.einsum("ht,thd->hd", scores.softmax(dim=-1)[:, : len(slots)], v)
            tolerance = 1e-5 if self.dtype == torch.float32 else 2.0**-8 * float(expected.abs().max()) + 4e-3
            assert (out[t].double() - expected).abs().max() < tolerance


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
@pytest.mark.parametrize(("shapes", "block_size"), SHAPES)
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group"), [(64, 3, 3), (32, 2, 1), (128, 1, 8), (96, 1, 5), (256, 1, 2), (64, 1, 4)]
)
def test_attention(
    dtype: torch.dtype,
    use_tiles: bool,
    shapes: list[tuple[int, int]],
    block_size: int,
    head_dim: int,
    kv_heads: int,
    group: int,
) -> None:
    case = Case(shapes, block_size, head_dim, kv_heads, group, dtype, FullAttention())
    case.check(case.attend(use_tiles))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 48, 80, 112, 160])
def test_attention_of_heads_of_any_sixteenth(dtype: torch.dtype, head_dim: int) -> None:
    case = Case([(255, 3), (300, 1)], 16, head_dim, 2, 3, dtype, SlidingWindow(100))
    case.check(case.attend(use_tiles=False))


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
@pytest.mark.parametrize(("shapes", "block_size"), SHAPES)
@pytest.mark.parametrize(
    "kind",
    [*map(SlidingWindow, (1, 16, 100, 255, 257)), ChunkedAttention(100)],
    ids=str,
)
def test_attention_within_a_window(
    dtype: torch.dtype, use_tiles: bool, shapes: list[tuple[int, int]], block_size: int, kind: AttentionKind
) -> None:
    case = Case(shapes, block_size, 64, 1, 4, dtype, kind)
    case.check(case.attend(use_tiles))


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
@pytest.mark.parametrize("kind", [FullAttention(), SlidingWindow(130)], ids=str)
def test_who_shares_a_chunk_does_not_change_a_bit(dtype: torch.dtype, use_tiles: bool, kind: AttentionKind) -> None:
    case = Case([(530 + 7 * i, 1) for i in range(5)], 16, 64, 1, 4, dtype, kind)
    together = case.attend(use_tiles)
    for number in range(len(case.seen)):
        assert torch.equal(case.alone(number).attend(use_tiles)[0], together[number])


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
@pytest.mark.parametrize("kind", [FullAttention(), SlidingWindow(130)], ids=str)
@pytest.mark.parametrize(("cap", "with_sinks"), [(0.5, False), (50.0, False), (0.0, True), (3.0, True)])
def test_attention_with_soft_caps_and_sinks(
    dtype: torch.dtype, use_tiles: bool, kind: AttentionKind, cap: float, with_sinks: bool
) -> None:
    sinks = torch.tensor([-30.0, 0.5, 3.0, 30.0]).to(dtype) if with_sinks else None
    case = Case(SHAPES[4][0], 16, 64, 2, 2, dtype, kind, cap, sinks)
    case.check(case.attend(use_tiles))


def chunks_of_two(starts: Sequence[int], *kinds: AttentionKind) -> Chunks:
    """Two requests whose first 512 tokens lie in the same blocks, of 16; a group of each kind."""
    tables = BlockTables(len(kinds), 2, 1024, 16, CPU)
    first, second = list(range(1, 41)), [*range(1, 33), *range(50, 58)]
    tables.append([(0, [first] * len(kinds)), (1, [second] * len(kinds))])
    inputs = build_inputs([request(start, 1) for start in starts], [0, 1], tables, kinds, torch.float32)
    return cut_into_chunks(inputs.groups, kinds, inputs.position_ids[0].numpy(), 16, 256)


def readers(chunks: Chunks) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each chunk: tokens, first keys, ends."""
    return [
        (chunks.tokens[a:b].tolist(), chunks.first[a:b].tolist(), chunks.visible[a:b].tolist()) for a, b in chunks.items
    ]


def test_chunks_that_hold_the_same_blocks_are_read_once() -> None:
    chunks = chunks_of_two([600, 620], FullAttention())
    # Longest first: token 0 is the second request. Two shared chunks of 256, then one of each.
    assert readers(chunks) == [
        ([0, 1], [0, 0], [256, 256]),
        ([0, 1], [0, 0], [256, 256]),
        ([0], [0], [109]),
        ([1], [0], [89]),
    ]
    assert chunks.partials.tolist() == [0, 3, 1, 4, 2, 5]
    assert chunks.slots[2, :109].tolist() == list(range(50 * 16, 50 * 16 + 109))
    assert set(chunks.slots[2, 109:].tolist()) == {50 * 16 + 108}


@pytest.mark.parametrize("starts", [(600, 620), (620, 600)])
def test_a_chunk_that_windows_cut_is_shared_from_the_first_key_that_anyone_sees(starts: tuple[int, int]) -> None:
    chunks = chunks_of_two(starts, SlidingWindow(500))
    # 620 sees from 121 on, 600 from 101: one chunk, of which each skips what it does not see.
    assert readers(chunks) == [
        ([0, 1], [121, 101], [256, 256]),
        ([0, 1], [0, 0], [256, 256]),
        ([0], [0], [109]),
        ([1], [0], [89]),
    ]
    assert chunks.slots[0, 99:104].tolist() == [16 + 101] * 3 + [16 + 102, 16 + 103]
    assert chunks.token_partials.tolist() == [[0, 3, 6]]


def test_a_window_within_one_chunk_is_one_chunk() -> None:
    chunks = chunks_of_two([600, 620], SlidingWindow(7))
    assert readers(chunks) == [([0], [102], [109]), ([1], [82], [89])]
    assert chunks.partials.tolist() == [0, 1]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("costs", [[5], [2304] * 8 + [180] * 8, [1, 1, 10_000], [0, 0]])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_every_head_of_every_chunk_is_one_threads_work(costs: list[int], num_kv_heads: int, num_threads: int) -> None:
    before = [sum(costs[:i]) for i in range(len(costs))]
    parts = [0] * num_threads
    for at, cost in zip(before, costs, strict=True):
        ends = [sharing.heads_of(t, num_threads, at, cost, sum(costs), num_kv_heads) for t in range(num_threads)]
        assert [head for first, last in ends for head in range(first, last)] == list(range(num_kv_heads))
        for thread, (first, last) in enumerate(ends):
            parts[thread] += (last - first) * cost
    fair = sum(costs) * num_kv_heads / num_threads
    assert max(parts) <= fair + max(costs)  # as even as whole heads allow


def test_chunks_cost_their_keys_for_each_reader_and_once_more_for_all() -> None:
    chunks = chunks_of_two([600, 620], FullAttention(), SlidingWindow(7), FullAttention())
    costs = [256 * 10, 256 * 10, 109 * 9, 89 * 9]
    assert np.diff(chunks.work).tolist() == [*costs, 7 * 9, 7 * 9, *costs]


def test_chunks_of_groups_follow_each_other_and_each_group_counts_its_results_from_0() -> None:
    full, windowed = FullAttention(), SlidingWindow(500)
    both = chunks_of_two([600, 620], windowed, full)
    apart = [chunks_of_two([600, 620], kind) for kind in (windowed, full)]
    assert both.groups.tolist() == [0, 4, 8]
    assert both.token_partials.tolist() == [[0, 3, 6], [0, 3, 6]]
    assert readers(both) == readers(apart[0]) + readers(apart[1])
    assert both.partials.tolist() == apart[0].partials.tolist() + apart[1].partials.tolist()
    assert np.array_equal(both.slots, np.concatenate([each.slots for each in apart]))
    assert both.items[4:].tolist() == (apart[1].items + both.items[3, 1]).tolist()


@needs_tiles
@pytest.mark.parametrize("block_size", [16, 1])
def test_keys_that_lie_in_order_are_not_copied_and_others_are(block_size: int) -> None:
    case = Case([(40, 1)], block_size, 32, 2, 1, torch.bfloat16, FullAttention())
    rows = case.chunks().slots[0] * 2 * 32 * 2
    copied, table = np.zeros(48 * 32, np.uint16), np.zeros((3, 2), np.int64)
    find(case.keys.data_ptr() + 64, rows.ctypes.data, 128, 32, 48, copied.ctypes.data, table.ctypes.data)
    in_place = [case.keys.data_ptr() + 64 + rows[16 * t] for t in range(2)]
    there = [copied.ctypes.data + 16 * 64 * t for t in range(3)]
    # The last 16 keys are the 8 that there are, and then the last one of them again.
    assert table[:2, 0].tolist() == (in_place if block_size == 16 else there[:2])
    assert table[:, 1].tolist() == ([128, 128, 64] if block_size == 16 else [64, 64, 64])
    assert table[2, 0] == there[2]
    expected = case.keys[torch.from_numpy(case.chunks().slots[0, 32:48]), 1]
    assert np.array_equal(copied.reshape(48, 32)[32:], expected.view(torch.uint16).numpy())
