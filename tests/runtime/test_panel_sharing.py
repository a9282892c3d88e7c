"""Claims: threads do every piece of a step once, attention is cut into pieces that cover it, and the head gives the
logits of the tokens that are asked for, whatever the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_architecture import make
from tiny_llama import ids

pytest.importorskip("numba")

from test_panel_step import by_panels, needs_tiles

from anaphora.core.groups import AttentionKind, FullAttention
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.attention import AttentionCall, GroupInputs, PagedContext, Span
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.kernels import barrier
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.panel_attention import SPAN_TOKENS
from anaphora.runtime.kernels.panel_step import GROUP_PANELS
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.panel_readers import Heads, Readers, find_readers
from anaphora.runtime.threads import ThreadTeam

NUM_TURNS, NUM_CLAIMS = 40, 25


@kernel
def _count(num_threads, claims, meeting, counts):
    for turn in range(NUM_TURNS):
        barrier.begin_turn(claims, turn)
        todo = barrier.claim(claims, turn)
        while todo < NUM_CLAIMS:
            counts[turn, todo] += 1
            todo = barrier.claim(claims, turn)
        barrier.meet(meeting, num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_every_number_of_every_turn_goes_to_one_thread(num_threads: int) -> None:
    team, claims = ThreadTeam(num_threads, barrier.BARRIER_SIZE), np.zeros(barrier.CLAIMS_SIZE, dtype=np.int64)
    counts = np.zeros((NUM_TURNS, NUM_CLAIMS), dtype=np.int64)
    arguments = (num_threads, claims.ctypes.data, team.barrier.ctypes.data, counts)
    team.run(lambda _: _count(*arguments), lambda: None)
    assert counts.min() == counts.max() == 1


def readers_of(
    spans: tuple[Span, ...], positions: np.ndarray, num_threads: int, kind: AttentionKind | None = None
) -> Readers:
    tables = np.zeros((len(spans), 80), dtype=np.int32)
    group = GroupInputs(torch.from_numpy(positions), (), spans, tables)
    return find_readers([group], [kind or FullAttention()], positions, 16, 64, Heads(2, 3), num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_units_cover_each_head_of_each_item_once_the_longest_first(num_threads: int) -> None:
    spans = (Span(0, 0, 76, 20), Span(1, 20, 30, 20), Span(2, 40, 4, 300))
    positions = np.concatenate([np.arange(76, 96), np.arange(30, 50), np.arange(4, 304)])
    readers = readers_of(spans, positions, num_threads)
    first_items = [0, 2, 4, 24]  # tokens 0 to 19 are in panels 0 and 1, 20 to 39 in 1 and 2, 40 to 339 in 2 to 21
    assert readers.items[:, 1:3].max() == 0  # all begin with the first key
    assert readers.items[:5, [0, 3, 4]].tolist() == [[0, 77, 92], [1, 0, 96], [1, 0, 42], [2, 0, 50], [2, 0, 12]]
    pieces: dict[tuple[int, int, int], list[tuple[int, int]]] = {
        (sequence, head, item): []
        for sequence in range(3)
        for head in range(2)
        for item in range(first_items[sequence], first_items[sequence + 1])
    }
    for sequence, head, begin, end, first_key, end_key, _ in readers.units.tolist():
        for item in range(begin, end):
            pieces[sequence, head, item].append((first_key, end_key))
    for (_, _, item), keys in pieces.items():
        ((first_key, end_key),) = keys
        assert first_key == 0
        assert end_key >= readers.items[item, 4]
    work = [int(readers.items[begin:end, 4].sum()) for _, _, begin, end, *_ in readers.units]
    assert work == sorted(work, reverse=True)
    assert readers.most_items == max(int(end - begin) for _, _, begin, end, *_ in readers.units)
    assert readers.merges.shape == (0, 5)


def test_few_items_are_cut_by_spans_of_keys_whose_results_are_merged() -> None:
    num_keys = 2 * SPAN_TOKENS + 5
    spans = (Span(0, 0, num_keys - 2, 2), Span(1, 2, 0, 8))
    positions = np.concatenate([np.arange(num_keys - 2, num_keys), np.arange(8)])
    readers = readers_of(spans, positions, 2)
    assert sorted(readers.units.tolist()) == [
        [0, 0, 0, 1, 0, SPAN_TOKENS, 0],
        [0, 0, 0, 1, SPAN_TOKENS, 2 * SPAN_TOKENS, 3],
        [0, 0, 0, 1, 2 * SPAN_TOKENS, num_keys, 6],
        [0, 1, 0, 1, 0, SPAN_TOKENS, 9],
        [0, 1, 0, 1, SPAN_TOKENS, 2 * SPAN_TOKENS, 12],
        [0, 1, 0, 1, 2 * SPAN_TOKENS, num_keys, 15],
        [1, 0, 1, 2, 0, 8, -1],
        [1, 1, 1, 2, 0, 8, -1],
    ]
    assert readers.merges.tolist() == [[0, head, 9 * (head // 3) + head % 3, 3, 3] for head in range(6)]
    assert readers.num_results == 18


@needs_tiles
@torch.inference_mode()
@pytest.mark.parametrize("vocab_size", [5, 32, 77, 256])
def test_the_head_gives_the_kept_tokens_logits_for_any_vocabulary(vocab_size: int) -> None:
    module = make("LlamaConfig", "LlamaForCausalLM", head_dim=32, num_hidden_layers=2, vocab_size=vocab_size)
    module.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, vocab_size))
    module = module.to(torch.bfloat16)
    layout, count = inspect_model(module, 1024), 16 * GROUP_PANELS + 45
    tokens = torch.tensor([[token % vocab_size for token in ids(1, count)]])
    positions = torch.arange(count)[None]
    num_blocks = -(-count // 16)
    table = np.arange(1, 1 + num_blocks, dtype=np.int32)[None]
    call = AttentionCall(0, count, 1, torch.from_numpy(table[0]), count, is_causal=True)
    group = GroupInputs(torch.arange(16, 16 + count), (call,), (Span(0, 0, 0, count),), table)

    def run(forward, keep: list[int]):  # type: ignore[no-untyped-def]
        cache = KVCache(
            layout.places, num_blocks=1 + num_blocks, block_size=16, dtype=torch.bfloat16, device=tokens.device
        )
        context = PagedContext(cache, layout.layers, (group,))
        return forward(tokens, positions, torch.tensor(keep, dtype=torch.int64), context)

    forward = by_panels(module)
    everything, hidden = run(forward, list(range(count)))
    assert hidden.shape == (count, module.config.hidden_size)
    right = torch.nn.functional.linear(hidden, module.lm_head.weight, module.lm_head.bias)
    assert everything.shape == right.shape
    assert float((everything.float() - right.float()).abs().max()) <= float(right.float().abs().max()) / 128
    for keep in ([], [count - 1], [0, 3, 17, count - 2], list(range(5, 40))):
        logits, again = run(forward, keep)
        assert torch.equal(again, hidden)
        assert torch.equal(logits, everything[keep])
    usual = run(PagedForward(module), [count - 1])[1]
    assert float((usual.float() - hidden.float()).norm() / usual.float().norm()) < 0.03


@needs_tiles
@torch.inference_mode()
def test_spans_merge_alike_whether_one_unit_reads_them_all_or_each_is_apart() -> None:
    module = make("LlamaConfig", "LlamaForCausalLM", head_dim=32, num_hidden_layers=1).to(torch.bfloat16)
    layout, count, last = inspect_model(module, 2048), 3 * SPAN_TOKENS + 20, 40
    tokens = torch.tensor([ids(1, count)])
    num_blocks = -(-count // 16)
    table = np.arange(1, 1 + num_blocks, dtype=np.int32)[None]
    forward = by_panels(module)

    def run(cache: KVCache, begin: int, end: int) -> torch.Tensor:
        group = GroupInputs(torch.arange(16 + begin, 16 + end), (), (Span(0, 0, begin, end - begin),), table)
        context = PagedContext(cache, layout.layers, (group,))
        hidden = forward(tokens[:, begin:end], torch.arange(begin, end)[None], torch.arange(0), context)[1]
        assert hidden is not None
        return hidden

    one, two = (
        KVCache(layout.places, num_blocks=1 + num_blocks, block_size=16, dtype=torch.bfloat16, device=tokens.device)
        for _ in range(2)
    )
    together = run(one, 0, count)
    run(two, 0, count - last)
    assert torch.equal(run(two, count - last, count), together[count - last :])
