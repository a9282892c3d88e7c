"""The reference attention, the pool and the step's tensors against formulas written out plainly."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from anaphora.core.groups import ChunkedAttention, FullAttention, SlidingWindow
from anaphora.core.ids import BlockId, RequestId, TokenId
from anaphora.core.plan import ScheduledRequest
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.inputs import StepInputs, build_inputs
from anaphora.runtime.kv_cache import KVCache, KVShape, LayerPlace, bytes_per_block, bytes_per_token

CPU = torch.device("cpu")
BLOCK_SIZE = 4
FULL = [FullAttention()]
LAYER = SimpleNamespace(layer_idx=7)


def request(start: int, n: int, sample: bool = False) -> ScheduledRequest:
    return ScheduledRequest(RequestId("r"), start, tuple(TokenId(100 + i) for i in range(n)), (), sample)


def naive(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One head, one query [key_dim] that sees all keys [n, key_dim]; float64 loops."""
    scores = [scale * float(query.double() @ key.double()) for key in keys]
    if softcap is not None:
        scores = [softcap * math.tanh(score / softcap) for score in scores]
    weights = [math.exp(score) for score in scores]
    total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks)))
    return sum(w / total * value.double() for w, value in zip(weights, values, strict=True))


@pytest.mark.parametrize("extra", ["none", "softcap", "sinks"])
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_over_the_pool_equals_the_naive_formula(kv_heads: int, value_dim: int, extra: str) -> None:
    """A first chunk, a later chunk and three single tokens in one step, in shuffled blocks among NaN."""
    generator = torch.Generator().manual_seed(kv_heads)
    cache = KVCache(
        [LayerPlace(0, 0, KVShape(kv_heads, 8, value_dim))],
        num_blocks=32,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=CPU,
    )
    cache.keys[0][1:] = torch.nan
    cache.values[0][1:] = torch.nan
    tables = BlockTables(1, 5, 24, BLOCK_SIZE, CPU)
    tables.append([(0, [[9, 3]]), (1, [[4, 8, 2, 30]]), (2, [[7, 1]]), (3, [[20, 5, 21, 6]]), (4, [[11]])])
    scheduled = [request(9, 5), request(0, 6), request(4, 1), request(13, 1), request(0, 1)]
    rows = [1, 0, 2, 3, 4]
    past = {}
    for r, row in zip(scheduled, rows, strict=True):
        keys = torch.randn(r.start, kv_heads, 8, generator=generator)
        values = torch.randn(r.start, kv_heads, value_dim, generator=generator)
        slots = [int(tables.ids[0, row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(r.start)]
        cache.write(0, torch.tensor(slots, dtype=torch.int64), keys, values)
        past[row] = (keys, values)
    inputs = build_inputs(scheduled, rows, tables, FULL, torch.float32)
    query = torch.randn(1, 4, 14, 8, generator=generator)
    key = torch.randn(1, kv_heads, 14, 8, generator=generator)
    value = torch.randn(1, kv_heads, 14, value_dim, generator=generator)
    softcap = 1.5 if extra == "softcap" else None
    sinks = torch.randn(4, generator=generator) if extra == "sinks" else None
    context = PagedContext(cache, {7: 0}, inputs.groups)
    output = context.attend(LAYER, query, key, value, scaling=0.3, softcap=softcap, s_aux=sinks)

    assert output.shape == (1, 14, 4, value_dim)
    for row, (begin, end) in zip(rows, inputs.spans, strict=True):
        keys = torch.cat([past[row][0], key[0, :, begin:end].transpose(0, 1)])
        values = torch.cat([past[row][1], value[0, :, begin:end].transpose(0, 1)])
        for token in range(begin, end):
            seen = len(keys) - (end - token - 1)
            for head in range(4):
                kv_head = head * kv_heads // 4
                expected = naive(
                    query[0, head, token],
                    keys[:seen, kv_head],
                    values[:seen, kv_head],
                    0.3,
                    softcap,
                    None if sinks is None else sinks[head],
                )
                assert (output[0, token, head].double() - expected).abs().max() < 1e-5


def step_inputs() -> StepInputs:
    tables = BlockTables(1, 4, 4096, BLOCK_SIZE, CPU)
    tables.append([(3, [[5, 6]]), (0, [[1]]), (1, [[2, 3, 9]])])
    return build_inputs(
        [request(0, 3), request(5, 1, True), request(6, 4, True)], [0, 3, 1], tables, FULL, torch.float32
    )


def test_single_tokens_come_first_in_the_packed_batch() -> None:
    inputs = step_inputs()
    assert inputs.spans == ((1, 4), (0, 1), (4, 8))
    assert inputs.input_ids.tolist() == [[100, 100, 101, 102, 100, 101, 102, 103]]
    assert inputs.position_ids.tolist() == [[5, 0, 1, 2, 6, 7, 8, 9]]
    assert inputs.groups[0].slot_mapping.tolist() == [25, 4, 5, 6, 14, 15, 36, 37]
    assert inputs.sampled == (1, 2)
    assert inputs.sample_rows.tolist() == [0, 7]


def test_each_call_sees_its_own_context() -> None:
    single, first, later = step_inputs().groups[0].calls
    assert (single.begin, single.end, single.num_keys, single.block_ids.tolist()) == (0, 1, 6, [5, 6])
    assert single.mask is None and not single.is_causal
    assert (first.begin, first.end, first.num_keys, first.is_causal) == (1, 4, 3, True)
    assert (later.begin, later.end, later.num_keys) == (4, 8, 10)
    assert [int((line == 0).sum()) for line in later.mask] == [7, 8, 9, 10]


def test_single_tokens_share_a_call_only_while_padding_is_cheap() -> None:
    tables = BlockTables(1, 4, 4096, BLOCK_SIZE, CPU)
    lengths = [2000, 1900, 1800, 10]
    tables.append([(row, [[row + 1] * -(-n // BLOCK_SIZE)]) for row, n in enumerate(lengths)])
    scheduled = [request(n - 1, 1) for n in lengths]
    inputs = build_inputs([scheduled[3], *scheduled[:3]], [3, 0, 1, 2], tables, FULL, torch.float32)
    assert [(call.begin, call.end) for call in inputs.groups[0].calls] == [(0, 3), (3, 4)]
    assert inputs.spans == ((3, 4), (0, 1), (1, 2), (2, 3))


def test_a_window_reads_only_the_blocks_that_hold_a_key_it_sees() -> None:
    """Up to the end of the tables, which the shorter of two sequences in one call does not read beyond."""
    tables = BlockTables(2, 3, 24, BLOCK_SIZE, CPU)
    tables.append([(row, [range(10 * row + 1, 10 * row + 7), range(10 * row + 31, 10 * row + 37)]) for row in range(3)])
    scheduled = [request(23, 1), request(22, 1), request(13, 7)]
    inputs = build_inputs(scheduled, [0, 1, 2], tables, [FullAttention(), SlidingWindow(4)], torch.float32)
    assert [call.block_ids.tolist() for call in inputs.groups[0].calls] == [
        [*range(1, 7), *range(11, 17)],
        [*range(21, 26)],
    ]
    singles, chunk = inputs.groups[1].calls
    assert singles.block_ids.tolist() == [36, 0, 45, 46]  # positions 20 to 23; 19 to 22
    assert (singles.mask[:, 0, 0] == 0).long().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert singles.stale_slots.tolist() == [15]
    assert (chunk.block_ids.tolist(), chunk.num_unseen, chunk.num_keys) == ([53, 54, 55], 2, 10)  # positions 10 to 19
    assert (chunk.mask == 0).long().tolist() == [[0] * i + [1] * 4 + [0] * (6 - i) for i in range(7)]
    assert inputs.groups[1].slot_mapping.tolist() == [147, 186, *range(217, 220), *range(220, 224)]


def test_a_chunk_that_starts_with_its_tokens_is_plainly_causal() -> None:
    tables = BlockTables(1, 1, 24, BLOCK_SIZE, CPU)
    tables.append([(0, [range(1, 7)])])
    for start, n, causal in ((0, 8, True), (8, 8, True), (8, 9, False), (7, 2, False), (9, 3, False)):
        inputs = build_inputs([request(start, n)], [0], tables, [ChunkedAttention(8)], torch.float32)
        (call,) = inputs.groups[0].calls
        assert call.is_causal == causal
        assert (call.mask is None) == causal


def test_released_rows_are_clean() -> None:
    tables = BlockTables(1, 2, 16, BLOCK_SIZE, CPU)
    row = tables.take_row()
    tables.append([(row, [[BlockId(3), BlockId(4)]])])
    tables.append([(row, [[BlockId(5)]])])
    assert tables.ids[0, row].tolist() == [3, 4, 5, 0]
    tables.release_row(row)
    assert not tables.ids.any() and not tables.on_cpu.any()
    assert sorted([tables.take_row(), tables.take_row()]) == [0, 1]


def test_layers_that_share_a_place_share_memory_as_wide_as_the_widest() -> None:
    narrow, wide = KVShape(2, 16, 16), KVShape(4, 24, 12)
    layers = [LayerPlace(0, 0, narrow), LayerPlace(0, 1, wide), LayerPlace(1, 0, wide)]
    assert bytes_per_block(layers, 16, torch.bfloat16) == 16 * 2 * (2 * 4 * 36)
    assert bytes_per_block(layers[::-1], 16, torch.bfloat16) == bytes_per_block(layers, 16, torch.bfloat16)
    assert bytes_per_token(layers, torch.bfloat16) == (2 * (2 * 32 + 4 * 36), 2 * 4 * 36)
    cache = KVCache(layers, num_blocks=3, block_size=16, dtype=torch.bfloat16, device=CPU)
    assert cache.num_bytes == 3 * bytes_per_block(layers, 16, torch.bfloat16)
    cache.write(0, torch.tensor([17]), torch.ones(1, 2, 16), torch.full((1, 2, 16), 2))
    cache.write(2, torch.tensor([33]), torch.full((1, 4, 24), 3), torch.full((1, 4, 12), 4))
    for layer, block, key, value in ((0, 1, 1, 2), (2, 2, 3, 4)):  # each finds its own where the other wrote nothing
        keys, values = cache.read(layer, torch.tensor([block]))
        assert set(keys[1].flatten().tolist()) == {key} and set(values[1].flatten().tolist()) == {value}
        assert keys.count_nonzero() == keys[1].numel() and values.count_nonzero() == values[1].numel()
    assert cache.keys[1].count_nonzero() == 0
    cache.wipe(torch.tensor([17, 33]))
    assert all(pool.count_nonzero() == 0 for pool in (*cache.keys, *cache.values))


def test_a_new_pool_is_zero_and_wiping_makes_slots_zero_again() -> None:
    cache = KVCache(
        [LayerPlace(0, place, KVShape(1, 2, 3)) for place in range(2)],
        num_blocks=3,
        block_size=2,
        dtype=torch.bfloat16,
        device=CPU,
    )
    assert all(t.count_nonzero() == 0 for t in (*cache.keys, *cache.values))
    slots = torch.tensor([5, 2, 3])
    for layer in range(2):
        cache.write(layer, slots, torch.ones(3, 1, 2), torch.full((3, 1, 3), torch.nan))
    cache.wipe(slots[:2])
    for layer in range(2):
        assert cache.keys[layer].flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 0, 1, 0, 0]
        assert cache.values[layer].isnan().nonzero()[:, :2].tolist() == [[1, 1]] * 3


def test_a_large_pool_takes_no_memory_before_it_is_used() -> None:
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().memory_info().rss
    cache = KVCache(
        [LayerPlace(0, 0, KVShape(8, 128, 128))], num_blocks=16384, block_size=16, dtype=torch.bfloat16, device=CPU
    )
    assert cache.keys[0].numel() * 2 == 2**29
    assert psutil.Process().memory_info().rss - before < 2**26
