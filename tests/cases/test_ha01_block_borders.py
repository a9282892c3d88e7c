"""HA1: every prompt length around a block border, cold and warm, in every chunking, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from subject import BLOCK_SIZE, Comparison, cap, chosen, cold, gen, gen_all, transformers_logprobs
from tiny_llama import ids

LENGTHS = [*range(1, 50), 63, 64, 65, 127, 128, 129]
BORDERS = [1, 15, 16, 17, 32, 33, 48, 49, 64, 65, 128, 129]
NUM_OUTPUTS = 8

Start = Callable[..., Any]
EACH_WAY = pytest.mark.parametrize(
    ("fresh", "tokens_per_step", "lengths"),
    [*(("python", size, LENGTHS) for size in (512, 7, 16, 17)), ("http", 512, BORDERS), ("http", 17, BORDERS)],
    ids=lambda value: str(value) if not isinstance(value, list) else "",
    indirect=["fresh"],
)


@EACH_WAY
def test_repeats_hit_all_but_the_block_of_the_last_token(
    fresh: Start, tokens_per_step: int, lengths: list[int]
) -> None:
    llm, comparison = fresh(num_blocks=256, max_num_batched_tokens=tokens_per_step), Comparison()
    for length in lengths:
        prompt = ids(2000 + length, length)
        outputs = [gen(llm, prompt, NUM_OUTPUTS) for _ in range(3)]
        assert [output.num_cached_tokens for output in outputs] == [0, cap(length), cap(length)]
        assert length < 17 or cap(length) > 0  # GUARD
        for output in outputs:
            comparison.equal(output, cold(prompt, NUM_OUTPUTS))
    comparison.close()


@EACH_WAY
def test_later_turns_hit_the_whole_prompt_before_them(fresh: Start, tokens_per_step: int, lengths: list[int]) -> None:
    llm, comparison = fresh(num_blocks=256, max_num_batched_tokens=tokens_per_step), Comparison()
    for length in lengths:
        prompt = ids(2000 + length, length)
        second = prompt + ids(2100, 16)
        third = second + ids(2101, 16)
        gen(llm, prompt, NUM_OUTPUTS)
        after_first, after_second = gen(llm, second, NUM_OUTPUTS), gen(llm, third, NUM_OUTPUTS)
        assert after_first.num_cached_tokens == BLOCK_SIZE * (length // BLOCK_SIZE)
        assert after_second.num_cached_tokens == BLOCK_SIZE * ((length + 16) // BLOCK_SIZE)
        comparison.equal(after_first, cold(second, NUM_OUTPUTS))
        comparison.equal(after_second, cold(third, NUM_OUTPUTS))
    comparison.close()


@EACH_WAY
def test_eight_at_once(fresh: Start, tokens_per_step: int, lengths: list[int]) -> None:
    llm, comparison = fresh(num_blocks=256, max_num_batched_tokens=tokens_per_step), Comparison()
    for first in range(0, len(lengths), 8):
        prompts = [ids(2000 + length, length) for length in lengths[first : first + 8]]
        for turn in range(2):
            for prompt, output in zip(prompts, gen_all(llm, prompts, NUM_OUTPUTS), strict=True):
                assert output.num_cached_tokens == (cap(len(prompt)) if turn else 0)
                comparison.equal(output, cold(prompt, NUM_OUTPUTS))
    comparison.close()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 129])
def test_eight_equal_prompts_at_once_are_computed_once(fresh: Start, length: int) -> None:
    llm, comparison = fresh(num_blocks=256), Comparison()
    prompt = ids(2000 + length, length)
    outputs = gen_all(llm, [prompt] * 8, NUM_OUTPUTS)
    assert sorted(output.num_cached_tokens for output in outputs) == [0] + [cap(length)] * 7
    assert llm.stats().counters.num_computed_prompt_tokens == length + 7 * (length - cap(length))
    for output in outputs:
        comparison.equal(output, cold(prompt, NUM_OUTPUTS))
    comparison.close()


def test_cold_is_what_transformers_gives() -> None:
    for length in (1, 15, 16, 17, 31, 32, 33, 64, 129):
        prompt = ids(2000 + length, length)
        output = cold(prompt, NUM_OUTPUTS)
        right = transformers_logprobs(prompt, output.outputs[0].token_ids)
        for step, (token, logprob) in enumerate(chosen(output)):
            assert token == int(right[step].argmax())
            assert abs(logprob - float(right[step, token])) < 1e-3
