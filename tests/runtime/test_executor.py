"""The executor computes hand-written plans as `transformers` computes the same tokens without a cache."""

from __future__ import annotations

import random

import pytest
import torch
from hand_plans import GREEDY, admit, assert_sampled, make_executor, part, step
from tiny_llama import ids, make_tiny_llama
from transformers import LlamaForCausalLM

from anaphora.sampling_params import SamplingParams

BROKEN = 5  # a token id that ids() never gives; its embedding becomes NaN


def run_in_chunks(executor, name, tokens, chunk, blocks, admission) -> object:
    """Compute a prompt in chunks with one block table; only the last chunk samples. Returns its result."""
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        result = step(
            executor,
            part(name, start, tokens[start:end], blocks if start == 0 else (), sample=end == len(tokens)),
            admitted=[admission] if start == 0 else [],
        )
        assert set(result.sampled) == ({name} if end == len(tokens) else set())
    return result


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 100])
def test_a_chunked_prompt_and_its_decode_equal_the_model_itself(tiny_llama: LlamaForCausalLM, chunk: int) -> None:
    executor = make_executor(tiny_llama)
    tokens = ids(1, 100)
    result = run_in_chunks(executor, "a", tokens, chunk, range(1, 8), admit("a", tokens))
    for _ in range(15):  # crosses from block 7 into block 8
        tokens.append(assert_sampled(tiny_llama, result, "a", tokens))
        new_blocks = [8] if len(tokens) == 113 else []
        result = step(executor, part("a", len(tokens) - 1, tokens[-1:], new_blocks))
    assert_sampled(tiny_llama, result, "a", tokens)


def test_requests_in_one_step_do_not_see_each_other(tiny_llama: LlamaForCausalLM) -> None:
    executor = make_executor(tiny_llama)
    a, b, c = ids(1, 40), ids(2, 33), ids(3, 1)
    result = step(
        executor,
        part("a", 0, a, [1, 2, 3]),
        part("c", 0, c, [7]),
        part("b", 0, b, [4, 5, 6]),
        admitted=[admit("a", a), admit("b", b), admit("c", c)],
    )
    assert list(result.sampled) == ["a", "c", "b"]
    for name, tokens in (("a", a), ("b", b), ("c", c)):
        tokens.append(assert_sampled(tiny_llama, result, name, tokens))
    # One decodes, one computes a chunk of given tokens, one decodes: lengths differ, so keys are padded.
    b += ids(9, 5)
    result = step(executor, part("c", 1, c[1:]), part("b", 33, b[33:]), part("a", 40, a[40:]))
    for name, tokens in (("a", a), ("b", b), ("c", c)):
        assert_sampled(tiny_llama, result, name, tokens)


@pytest.mark.parametrize("reader_first", [False, True])
def test_a_request_reads_blocks_that_the_same_step_writes(tiny_llama: LlamaForCausalLM, reader_first: bool) -> None:
    executor = make_executor(tiny_llama)
    shared = ids(1, 32)
    a, b, c = shared + ids(2, 9), shared + ids(3, 20), shared + ids(4, 1)
    scheduled = [
        part("a", 0, a, [1, 2, 3]),
        part("b", 32, b[32:], [1, 2, 4, 5]),
        part("c", 32, c[32:], [1, 2, 6]),
    ]
    if reader_first:
        scheduled.reverse()
    result = step(executor, *scheduled, admitted=[admit("a", a), admit("b", b), admit("c", c)])
    for name, tokens in (("a", a), ("b", b), ("c", c)):
        assert_sampled(tiny_llama, result, name, tokens)


def test_block_ids_may_come_in_any_order(tiny_llama: LlamaForCausalLM) -> None:
    executor = make_executor(tiny_llama, block_size=4, num_blocks=33)
    blocks = list(range(1, 33))
    random.Random(0).shuffle(blocks)
    tokens = ids(1, 100)
    result = run_in_chunks(executor, "a", tokens, 30, blocks[:25], admit("a", tokens))
    tokens.append(assert_sampled(tiny_llama, result, "a", tokens))
    result = step(executor, part("a", 100, tokens[100:], blocks[25:26]))
    assert_sampled(tiny_llama, result, "a", tokens)


def test_nothing_in_unwritten_slots_is_ever_read(tiny_llama: LlamaForCausalLM) -> None:
    executor = make_executor(tiny_llama)
    for pool in (*executor.cache.keys, *executor.cache.values):
        pool[1:] = torch.nan
    a, b, c = ids(1, 40), ids(2, 3), ids(3, 18)
    # The last block of each table is for tokens to come.
    result = step(
        executor,
        part("a", 0, a[:39], [1, 2, 3, 4], sample=False),
        part("b", 0, b[:2], [5, 6, 7], sample=False),
        part("c", 0, c[:17], [8, 9, 10], sample=False),
        admitted=[admit("a", a), admit("b", b), admit("c", c)],
    )
    assert result.failed == {}
    result = step(executor, part("b", 2, b[2:]), part("a", 39, a[39:]), part("c", 17, c[17:]))
    assert result.failed == {}
    for name, tokens in (("a", a), ("b", b), ("c", c)):
        assert_sampled(tiny_llama, result, name, tokens)


def test_a_released_id_can_be_admitted_again_in_the_same_plan(tiny_llama: LlamaForCausalLM) -> None:
    executor = make_executor(tiny_llama, max_num_seqs=1)
    old, new = ids(1, 40), ids(2, 10)
    step(executor, part("a", 0, old, [1, 2, 3]), admitted=[admit("a", old)])
    result = step(executor, part("a", 0, new, [9]), admitted=[admit("a", new)], released=["a"])
    assert_sampled(tiny_llama, result, "a", new)
    again = step(executor, part("b", 0, old, [1, 2, 3]), admitted=[admit("b", old)], released=["a"])
    assert_sampled(tiny_llama, again, "b", old)


def test_a_plan_that_its_tables_do_not_cover_is_refused(tiny_llama: LlamaForCausalLM) -> None:
    executor = make_executor(tiny_llama, max_num_seqs=1)
    with pytest.raises(ValueError, match=r"block table of request 'a' does not cover"):
        step(executor, part("a", 0, ids(1, 17), [1]), admitted=[admit("a", ids(1, 17))])
    with pytest.raises(ValueError, match="raise max_num_seqs"):
        step(executor, admitted=[admit("b", ids(1, 17))])


def broken_llama() -> LlamaForCausalLM:
    module = make_tiny_llama()
    with torch.no_grad():
        module.model.embed_tokens.weight[BROKEN] = torch.nan
    return module


def slots(executor, layer: int) -> torch.Tensor:
    """Keys and values of a layer by slot: [num_slots, kv_heads, 2 * dim]."""
    return torch.cat([executor.cache.keys[layer], executor.cache.values[layer]], dim=-1).flatten(0, 1)


@pytest.mark.parametrize("sample", [True, False])
def test_a_non_finite_request_fails_alone_and_its_slots_are_wiped(sample: bool) -> None:
    module = broken_llama()
    executor = make_executor(module)
    good, bad = ids(1, 20), ids(2, 30)
    step(executor, part("bad", 0, bad[:18], [3, 4], sample=False), admitted=[admit("bad", bad)])
    before = slots(executor, 2)[48:66].clone()
    bad[25] = BROKEN
    result = step(
        executor,
        part("bad", 18, bad[18:], sample=sample),
        part("good", 0, good, [1, 2]),
        admitted=[admit("good", good)],
    )
    assert result.failed == {"bad": "the model's hidden states at positions 18 to 29 are not all finite"}
    assert list(result.sampled) == ["good"]
    assert_sampled(module, result, "good", good)
    for layer in range(4):
        assert slots(executor, layer)[66:78].count_nonzero() == 0  # positions 18 to 29 in blocks 3 and 4
    assert before.count_nonzero() == before.numel()
    assert torch.equal(slots(executor, 2)[48:66], before)  # what it wrote in an earlier step stays


def test_only_whose_own_output_is_broken_is_named() -> None:
    """Who read its blocks in this step is the scheduler's to know. The fault shows behind the last layer here."""
    module = make_tiny_llama()
    executor = make_executor(module)
    shared = ids(1, 16)
    bad, reader, other = shared + ids(2, 9), shared + ids(3, 4), ids(4, 4)

    def break_token_24(layer: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        output[0, 24] = torch.nan  # the last of `bad`, which is packed first

    module.model.layers[3].register_forward_hook(break_token_24)
    result = step(
        executor,
        part("bad", 0, bad, [1, 2]),
        part("reader", 16, reader[16:], [1, 3]),
        part("other", 0, other, [4]),
        admitted=[admit("bad", bad), admit("reader", reader), admit("other", other)],
    )
    assert list(result.failed) == ["bad"]
    assert list(result.sampled) == ["reader", "other"]
    assert slots(executor, 0)[16:48].count_nonzero() == 0  # blocks 1 and 2


def test_an_exception_in_the_forward_wipes_the_slots_of_the_plan() -> None:
    module = make_tiny_llama()
    executor = make_executor(module)
    kept, tokens = ids(1, 16), ids(2, 20)
    step(executor, part("kept", 0, kept, [1]), admitted=[admit("kept", kept)])
    before = slots(executor, 0)[16:32].clone()

    def explode(*_: object) -> None:
        raise RuntimeError("no memory")

    hook = module.model.layers[3].register_forward_pre_hook(explode)
    with pytest.raises(RuntimeError, match="no memory"):
        step(executor, part("a", 0, tokens, [2, 3]), admitted=[admit("a", tokens)])
    hook.remove()
    for layer in range(4):
        assert slots(executor, layer)[32:].count_nonzero() == 0
    assert torch.equal(slots(executor, 0)[16:32], before)
    result = step(executor, part("a", 0, tokens, [2, 3]), admitted=[admit("a", tokens)], released=["a"])
    assert_sampled(module, result, "a", tokens)


def test_the_module_is_its_owners_between_steps(tiny_llama: LlamaForCausalLM) -> None:
    prompt = ids(1, 20)
    before = tiny_llama.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
    executor = make_executor(tiny_llama)
    step(executor, part("a", 0, prompt, [1, 2]), admitted=[admit("a", prompt)])
    assert tiny_llama.config._attn_implementation == "sdpa"
    assert not tiny_llama.model._forward_hooks
    after = tiny_llama.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
    assert torch.equal(before, after)


def test_two_executors_share_a_module_and_nothing_else(tiny_llama: LlamaForCausalLM) -> None:
    one, two = make_executor(tiny_llama), make_executor(tiny_llama, block_size=8)
    a, b = ids(1, 21), ids(2, 21)
    step(one, part("x", 0, a[:20], [1, 2], sample=False), admitted=[admit("x", a)])
    step(two, part("x", 0, b[:20], [1, 2, 3], sample=False), admitted=[admit("x", b)])
    assert_sampled(tiny_llama, step(one, part("x", 20, a[20:])), "x", a)
    assert_sampled(tiny_llama, step(two, part("x", 20, b[20:])), "x", b)


def test_a_seeded_choice_depends_on_neither_the_batch_nor_the_chunks(tiny_llama: LlamaForCausalLM) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=0.9)
    tokens, other = ids(1, 50), ids(2, 30)

    def chosen(chunk: int, companions: bool, seed: int) -> list[int]:
        executor = make_executor(tiny_llama)
        if companions:
            step(executor, part("o", 0, other, [10, 11, 12]), admitted=[admit("o", other, sampling, seed=77)])
        result = run_in_chunks(executor, "a", tokens, chunk, [1, 2, 3, 4], admit("a", tokens, sampling, seed=seed))
        output = [result.sampled["a"].token_id]
        for position in range(50, 60):
            parts = [part("a", position, output[-1:])]
            if companions:
                parts.insert(0, part("o", position - 20, ids(position, 1)))
            output.append(step(executor, *parts).sampled["a"].token_id)
        return output

    alone = chosen(50, companions=False, seed=5)
    assert chosen(7, companions=False, seed=5) == alone
    assert chosen(50, companions=True, seed=5) == alone
    assert chosen(50, companions=False, seed=6) != alone


def test_penalties_see_prompt_and_output_and_survive_preemption(tiny_llama: LlamaForCausalLM) -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)
    prompt = ids(1, 20)

    def naive(tokens: list[int]) -> int:
        with torch.no_grad():
            logits = tiny_llama(torch.tensor([tokens])).logits[0, -1]
        for token in set(tokens):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in set(tokens[20:]):
            logits[token] -= 0.4 + 0.7 * tokens[20:].count(token)
        return int(logits.argmax())

    executor = make_executor(tiny_llama)
    tokens = list(prompt)
    result = step(executor, part("a", 0, tokens, [1, 2, 3]), admitted=[admit("a", tokens, sampling)])
    for _ in range(12):
        assert result.sampled["a"].token_id == naive(tokens)
        tokens.append(result.sampled["a"].token_id)
        result = step(executor, part("a", len(tokens) - 1, tokens[-1:]))
    assert len(set(tokens[20:])) > 6  # without penalties greedy choice repeats itself more
    preempted = admit("a", tokens, sampling, num_prompt=20)
    result = step(executor, part("a", 0, tokens, [5, 6, 7]), admitted=[preempted], released=["a"])
    assert result.sampled["a"].token_id == naive(tokens)


def test_times_are_measured(tiny_llama: LlamaForCausalLM) -> None:
    executor = make_executor(tiny_llama)
    result = step(executor, part("a", 0, ids(1, 20), [1, 2]), admitted=[admit("a", ids(1, 20), GREEDY)])
    assert result.compute_s > 0.0
    assert result.sample_s > 0.0
