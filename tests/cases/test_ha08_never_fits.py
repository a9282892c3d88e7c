"""HA8: a request that can never fit. 32 usable blocks, context limit 4096 (larger than the pool)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from subject import Comparison, blocks, cap, cold, gen, gen_all, params
from tiny_llama import ids

from anaphora.errors import PromptTooLongError

USABLE = 32
CAPACITY = 16 * USABLE


@pytest.fixture
def llm(fresh: Callable[..., Any]) -> Any:
    """The model's context is 4096."""
    llm = fresh(num_blocks=USABLE)
    assert llm.stats().gauges.num_total_blocks == USABLE  # GUARD
    return llm


def test_refused_at_once_and_the_next_one_runs(llm: Any) -> None:
    before = llm.stats()
    with pytest.raises(PromptTooLongError, match=r"1000 tokens.*512"):  # of the pool: the context would do
        gen(llm, ids(2800, 1000))
    assert llm.stats().gauges == before.gauges
    assert gen(llm, ids(2801, 20), 4).outputs[0].finish_reason == "length"


def test_output_that_outgrows_the_pool_ends_with_length(llm: Any) -> None:
    prompt = ids(2802, 400)
    big, small = llm.generate([prompt, ids(2803, 20)], [params(200), params(4)])
    # The last token's K/V are never needed: one token more than the pool holds can be known.
    assert len(big.outputs[0].token_ids) == CAPACITY + 1 - 400
    assert big.outputs[0].finish_reason == "length"
    assert len(small.outputs[0].token_ids) == 4
    comparison = Comparison()
    comparison.equal(big, cold(prompt, CAPACITY + 1 - 400))


def test_the_limit_is_exact_whatever_is_cached(llm: Any) -> None:
    for state in ("empty", "full of other prompts", "90 % of this prompt cached"):
        for length in (CAPACITY - 1, CAPACITY, CAPACITY + 1):
            llm.reset_prefix_cache()
            prompt = ids(2810, length)
            if state == "full of other prompts":
                gen(llm, ids(2811, CAPACITY))
                assert blocks(llm.stats()).blank == 0
            elif state.startswith("90"):
                gen(llm, prompt[: int(0.9 * length)])
            if length > CAPACITY:
                with pytest.raises(PromptTooLongError):
                    gen(llm, prompt)
            else:
                output = gen(llm, prompt)
                assert output.outputs[0].finish_reason == "length"
                expected = 16 * (int(0.9 * length) // 16) if state.startswith("90") else 0
                assert output.num_cached_tokens == expected


def test_a_prompt_of_1000_is_refused_with_most_of_it_cached(llm: Any) -> None:
    prompt = ids(2820, 1000)
    gen(llm, prompt[:CAPACITY])
    with pytest.raises(PromptTooLongError):
        gen(llm, prompt)
    assert gen(llm, prompt[:CAPACITY]).num_cached_tokens == cap(CAPACITY)


@pytest.mark.parametrize("fresh", ["python"], indirect=True)
def test_ten_requests_of_twenty_blocks_all_finish_in_order(llm: Any) -> None:
    prompts = [ids(2830 + number, 20 * 16) for number in range(10)]
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, params(3))
    order = []
    while llm.engine.has_unfinished:
        order += [step.request_id for step in llm.engine.step() if step.finished]
    assert order == [str(number) for number in range(10)]
    assert llm.stats().counters.num_preemptions == 0


def test_two_whose_cached_parts_fit_together_but_whose_rests_do_not(llm: Any) -> None:
    first, second = ids(2840, 16 * 12), ids(2841, 16 * 12)
    gen_all(llm, [first, second])
    long = [first + ids(2842, 16 * 12), second + ids(2843, 16 * 12)]
    outputs = gen_all(llm, long, 4)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    assert max(output.num_cached_tokens for output in outputs) == 16 * 12  # the other one's may have been evicted
    comparison = Comparison()
    for prompt, output in zip(long, outputs, strict=True):
        comparison.equal(output, cold(prompt, 4))
    comparison.close()
