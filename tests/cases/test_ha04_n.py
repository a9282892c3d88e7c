"""HA4: several sequences for one prompt: computed once, forked inside a block, each as if it were alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from http_subject import settled
from subject import BLOCK_SIZE, Comparison, cap, chosen, cold, gen, params, start
from tiny_llama import ids

from anaphora import SamplingParams
from anaphora.engine.outputs import RequestOutput

Start = Callable[..., Any]
LENGTHS = [33, 40, 48]
NUM_OUTPUTS = 40
SEED = 5
SAMPLED = SamplingParams(n=4, temperature=1.0, seed=SEED, max_tokens=NUM_OUTPUTS, logprobs=2)
GREEDY = params(NUM_OUTPUTS, n=4)


def prompt_of(length: int) -> list[int]:
    return ids(2400, length)


def sequences(output: RequestOutput) -> list[list[int]]:
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in output.outputs] == ["length"] * 4
    return [choice.token_ids for choice in output.outputs]


@cache
def alone(length: int, seed: int) -> RequestOutput:
    """A single request with the seed that choice `seed - SEED` has, cache off."""
    llm = start(enable_prefix_caching=False)
    return llm.generate(prompt_of(length), dataclasses.replace(SAMPLED, n=1, seed=seed))[0]


def right(length: int) -> list[list[int]]:
    return [alone(length, SEED + index).outputs[0].token_ids for index in range(4)]


def single(output: RequestOutput, index: int) -> RequestOutput:
    return dataclasses.replace(output, outputs=[output.outputs[index]])


def streamed(llm: Any, length: int) -> RequestOutput:
    """The streamed request; its pieces add up to the whole, which comes with the last one."""
    steps = list(llm.stream(prompt_of(length), SAMPLED))
    assert {step.index for step in steps} == {0, 1, 2, 3}
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    whole = steps[-1].output
    assert whole is not None
    for index, choice in enumerate(whole.outputs):
        assert [token for step in steps if step.index == index for token in step.token_ids] == choice.token_ids
    return whole


@pytest.mark.parametrize("tokens_per_step", [512, 17])
@pytest.mark.parametrize("length", LENGTHS)
def test_four_sequences_are_what_four_requests_give_cold_warm_and_streamed(
    fresh: Start, length: int, tokens_per_step: int
) -> None:
    llm, comparison = fresh(max_num_batched_tokens=tokens_per_step), Comparison()
    first, second = (llm.generate(prompt_of(length), SAMPLED)[0] for _ in range(2))
    for output in (first, second, streamed(llm, length)):
        assert sequences(output) == right(length)
        for index in range(4):
            comparison.equal(single(output, index), alone(length, SEED + index))
    comparison.close()
    assert len({tuple(tokens) for tokens in right(length)}) == 4
    assert length != 40 or len({tuple(tokens[:7]) for tokens in right(length)}) == 4  # GUARD
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cap(length))
    assert len(first.prompt_token_ids) == length


@pytest.mark.parametrize("length", LENGTHS)
def test_the_prompt_is_computed_once(length: int) -> None:
    llm = start()
    output = llm.generate(prompt_of(length), SAMPLED)[0]
    computed = length + 3 * (length - cap(length))
    assert llm.stats().counters.num_computed_prompt_tokens == computed
    assert output.metrics.num_computed_prompt_tokens == computed


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_choices_are_one_text(fresh: Start, length: int) -> None:
    llm, comparison = fresh(), Comparison()
    output = llm.generate(prompt_of(length), GREEDY)[0]
    for index in range(4):
        comparison.equal(single(output, index), cold(prompt_of(length), NUM_OUTPUTS))
    assert len({tuple(tokens) for tokens in sequences(output)}) == 1
    comparison.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_each_choice_can_be_continued(fresh: Start, length: int) -> None:
    llm, comparison = fresh(), Comparison()
    for tokens in sequences(llm.generate(prompt_of(length), SAMPLED)[0]):
        prompt = prompt_of(length) + tokens + ids(2401, 5)
        output = gen(llm, prompt, 8)
        # All of the prompt and the output but the last token, whose K/V nobody needed.
        assert output.num_cached_tokens == BLOCK_SIZE * ((length + NUM_OUTPUTS - 1) // BLOCK_SIZE)
        comparison.equal(output, cold(prompt, 8))
    comparison.close()


def test_a_stream_that_is_closed_early_leaves_nothing(fresh: Start) -> None:
    llm = fresh()
    stream = llm.stream(prompt_of(40), dataclasses.replace(SAMPLED, max_tokens=800))
    steps = [next(stream) for _ in range(5)]
    assert {step.index for step in steps} <= {0, 1, 2, 3}
    assert llm.stats().gauges.num_live_blocks > 0  # GUARD
    stream.close()
    gauges = settled(llm).gauges
    assert (gauges.num_live_blocks, gauges.num_running, gauges.num_waiting, gauges.num_following) == (0, 0, 0, 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_pool_for_two_and_a_half_sequences_gives_the_same(fresh: Start, length: int) -> None:
    shared = cap(length) // BLOCK_SIZE
    own = -(-(length + NUM_OUTPUTS - 1) // BLOCK_SIZE) - shared
    llm = fresh(num_blocks=shared + 2 * own + own // 2)
    assert sequences(llm.generate(prompt_of(length), SAMPLED)[0]) == right(length)
    assert llm.stats().counters.num_preemptions > 0  # GUARD
    assert llm.stats().gauges.num_live_blocks == 0


def test_several_prompts_with_several_sequences_each_come_in_order() -> None:
    llm = start()
    wanted = [SAMPLED, dataclasses.replace(SAMPLED, n=1), dataclasses.replace(SAMPLED, n=2, prompt_logprobs=0)]
    outputs = llm.generate([prompt_of(length) for length in LENGTHS], wanted)
    assert [len(output.outputs) for output in outputs] == [4, 1, 2]
    for length, output in zip(LENGTHS, outputs, strict=True):
        assert [choice.token_ids for choice in output.outputs] == right(length)[: len(output.outputs)]
    assert [output.prompt_logprobs and len(output.prompt_logprobs) for output in outputs] == [None, None, 48]


def test_chosen_logprobs_of_each_choice_are_its_own() -> None:
    output = start().generate(prompt_of(40), SAMPLED)[0]
    assert len({tuple(chosen(single(output, index))) for index in range(4)}) == 4
