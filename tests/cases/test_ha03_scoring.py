"""HA3: scoring a prompt that is already cached. Steps 1 to 5 and 7; step 6 is in test_ha03_embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from subject import TOLERANCE, Comparison, cap, cold, gen, params, start, transformers_logprobs
from tiny_llama import ids

from anaphora import SamplingParams
from anaphora.engine.outputs import Logprob, RequestOutput

Start = Callable[..., Any]
P = ids(2300, 70)
Q = P[:48] + ids(2301, 22)
NUM_OUTPUTS = 4


def scoring(k: int, max_tokens: int = NUM_OUTPUTS) -> SamplingParams:
    return params(max_tokens, prompt_logprobs=k)


def score(llm: Any, prompt: Sequence[int], k: int, max_tokens: int = NUM_OUTPUTS) -> RequestOutput:
    return llm.generate([list(prompt)], scoring(k, max_tokens))[0]


def entries(output: RequestOutput) -> list[dict[int, Logprob]]:
    """What is said of each prompt token from the second on."""
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    rest = output.prompt_logprobs[1:]
    assert None not in rest
    return rest  # type: ignore[return-value]


def assert_scores(output: RequestOutput, prompt: Sequence[int], k: int) -> None:
    """Every entry is what `transformers` gives: the token's own logprob and rank, and the k likeliest tokens."""
    right = transformers_logprobs(prompt[:1], prompt[1:])
    for position, (token, entry) in enumerate(zip(prompt[1:], entries(output), strict=True)):
        assert abs(entry[token].logprob - float(right[position, token])) < TOLERANCE
        assert entry[token].rank == 1 + int((right[position] > right[position, token]).sum())
        likeliest = right[position].topk(k).indices.tolist()
        assert entry.keys() == {token, *likeliest}
        for other in likeliest:
            assert abs(entry[other].logprob - float(right[position, other])) < TOLERANCE


@pytest.mark.parametrize(
    ("fresh", "tokens_per_step"),
    [*(("python", size) for size in (512, 7, 16, 17)), ("http", 512)],
    indirect=["fresh"],
)
@pytest.mark.parametrize("k", [0, 1, 5])
def test_a_cached_prompt_is_scored_as_a_cold_one(fresh: Start, k: int, tokens_per_step: int) -> None:
    llm, comparison = fresh(max_num_batched_tokens=tokens_per_step), Comparison()
    gen(llm, P, NUM_OUTPUTS)
    gen(llm, Q, NUM_OUTPUTS)
    assert gen(llm, P, NUM_OUTPUTS).num_cached_tokens == 64  # GUARD
    for prompt in (P, Q, P, Q):
        output = score(llm, prompt, k)
        assert output.num_cached_tokens == 0
        assert_scores(output, prompt, k)
        comparison.equal(output, cold(prompt, NUM_OUTPUTS))
        fresh = score(start(max_num_batched_tokens=tokens_per_step), prompt, k)
        for mine, theirs in zip(entries(output), entries(fresh), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(abs(mine[token].logprob - theirs[token].logprob) < TOLERANCE for token in mine)
    comparison.close()
    plain = gen(llm, P)
    assert (plain.num_cached_tokens, plain.prompt_logprobs) == (cap(70), None)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64, 65])
def test_echo_at_block_borders_with_and_without_output(fresh: Start, length: int) -> None:
    llm, comparison = fresh(), Comparison()
    prompt = P[:length]
    gen(llm, prompt)
    output = score(llm, prompt, 1)
    assert_scores(output, prompt, 1)
    comparison.equal(output, cold(prompt, NUM_OUTPUTS))
    only = score(llm, prompt, 1, max_tokens=0)
    assert only.prompt_logprobs == output.prompt_logprobs
    (choice,) = only.outputs
    assert (choice.token_ids, choice.logprobs, choice.text, choice.finish_reason) == ([], [], "", "length")
    assert gen(llm, prompt).num_cached_tokens == cap(length)
    gauges = llm.stats().gauges
    assert (gauges.num_live_blocks, gauges.num_running) == (0, 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_others_in_the_batch_still_hit(fresh: Start, order: tuple[int, ...]) -> None:
    llm, comparison = fresh(), Comparison()
    gen(llm, P, NUM_OUTPUTS)
    gen(llm, Q, NUM_OUTPUTS)
    asked = [(P, scoring(5), 0), (P, params(NUM_OUTPUTS), 64), (Q, params(NUM_OUTPUTS), 64)]
    asked = [asked[index] for index in order]
    outputs = llm.generate([list(prompt) for prompt, _, _ in asked], [one for _, one, _ in asked])
    for output, (prompt, one, hit) in zip(outputs, asked, strict=True):
        assert output.num_cached_tokens == hit
        comparison.equal(output, cold(prompt, NUM_OUTPUTS))
        if one.prompt_logprobs is not None:
            assert_scores(output, prompt, 5)
    comparison.close()


def test_a_cold_prompt_that_is_scored_is_shared_with_who_comes_with_it() -> None:
    llm, comparison = start(), Comparison()
    first, second = llm.generate([P, P], [scoring(0), params(NUM_OUTPUTS)])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cap(70))
    assert_scores(first, P, 0)
    comparison.equal(second, cold(P, NUM_OUTPUTS))


@pytest.mark.parametrize("tokens_per_step", [512, 7])
def test_counters_keep_apart_what_looks_nothing_up(tokens_per_step: int) -> None:
    llm = start(max_num_batched_tokens=tokens_per_step)
    gen(llm, P)
    before = llm.stats().counters
    score(llm, P, 0)
    delta = llm.stats().counters.delta(before)
    assert (delta.num_queried_tokens, delta.num_hit_tokens, delta.num_bypassed_tokens) == (0, 0, 70)
    assert delta.num_computed_prompt_tokens == 70


def test_a_preempted_scoring_request_finds_what_it_has_computed_and_gives_every_entry_once() -> None:
    # Two prompts of 5 blocks and one output block each in a pool of 10: one gives way.
    llm, comparison = start(num_blocks=10, max_num_batched_tokens=16), Comparison()
    prompts = [ids(2310, 78), ids(2311, 78)]
    outputs = llm.generate(prompts, [scoring(1, 20)] * 2)
    counters = llm.stats().counters
    assert counters.num_preemptions > 0  # GUARD
    assert (counters.num_bypassed_tokens, counters.num_queried_tokens) == (156, 0)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_scores(output, prompt, 1)
        comparison.equal(output, cold(prompt, 20))
    comparison.close()


def test_a_prompt_longer_than_the_rows_that_are_scored_at_once() -> None:
    prompt = ids(2320, 600)
    llm = start(max_num_batched_tokens=1024)
    assert_scores(score(llm, prompt, 2, max_tokens=0), prompt, 2)
