"""HA7: eviction takes the right block. Outputs are one token, so no generated block fills."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from http_subject import slowed
from subject import Comparison, blocks, cap, cold, gen, gen_all, params, start
from tiny_llama import ids

Start = Callable[..., Any]
USABLE = 40


def evictions(llm) -> int:  # type: ignore[no-untyped-def]
    return llm.stats().counters.num_evicted_blocks


@pytest.mark.parametrize(("fresh", "num_repeats"), [("python", 20), ("http", 2)], indirect=["fresh"])
def test_tail_first(fresh: Start, num_repeats: int) -> None:
    comparison = Comparison()
    for repeat in range(num_repeats):
        llm = fresh(num_blocks=USABLE)
        prompt = ids(2700, 16 * USABLE - 8)
        gen(llm, prompt)
        gen(llm, ids(2750 + repeat, 40))
        again = gen(llm, prompt)
        assert again.num_cached_tokens == 16 * (USABLE - 3)
        assert evictions(llm) >= 2  # GUARD
        comparison.equal(again, cold(prompt, 1))
    comparison.close()


def a_b_c_then_a_again(llm):  # type: ignore[no-untyped-def]
    """Three prompts of a quarter of the pool each, then a touched again, then two quarters of new ones."""
    quarter = 16 * (USABLE // 4)
    a, b, c = (ids(seed, quarter) for seed in (2710, 2711, 2712))
    for prompt in (a, b, c, a):
        gen(llm, prompt)
    gen(llm, ids(2713, quarter))
    gen(llm, ids(2714, quarter))
    return a, b, c


def test_least_recent_first(fresh: Start) -> None:
    llm = fresh(num_blocks=USABLE)
    a, b, c = a_b_c_then_a_again(llm)
    assert gen(llm, a).num_cached_tokens == cap(len(a))
    assert gen(llm, c).num_cached_tokens == cap(len(c))
    assert gen(llm, b).num_cached_tokens == 0
    assert evictions(llm) > 0  # GUARD


def test_least_recent_first_one_quarter_further(fresh: Start) -> None:
    llm = fresh(num_blocks=USABLE)
    a, _, c = a_b_c_then_a_again(llm)
    gen(llm, ids(2715, len(a)))
    assert gen(llm, a).num_cached_tokens == cap(len(a))
    assert gen(llm, c).num_cached_tokens == 0


def test_worthless_blocks_first(fresh: Start) -> None:
    llm = fresh(num_blocks=USABLE)
    valuable = ids(2720, 16 * (USABLE // 2))
    gen(llm, valuable)
    for number in range(200):  # GUARD: more than the pool in all
        gen(llm, ids(3000 + number, 9))
    assert gen(llm, valuable).num_cached_tokens == cap(len(valuable))
    assert evictions(llm) == 0


def test_shared_stays() -> None:
    llm, comparison = start(num_blocks=USABLE), Comparison()
    stem = ids(2730, 160)
    long = stem + ids(2731, 5)
    engine = llm.engine
    engine.add_request("long", long, params(120))
    finished = []
    for number in range(5 * USABLE // 10):
        for _ in range(3):
            finished += [step.output for step in engine.step() if step.output]
        engine.add_request(f"churn-{number}", ids(2800 + number, 150), params(1))
        engine.add_request(f"ask-{number}", [*stem, 9 + number], params(1))
    while engine.has_unfinished:
        finished += [step.output for step in engine.step() if step.output]
    outputs = {output.request_id: output for output in finished}
    asks = [outputs[f"ask-{number}"] for number in range(5 * USABLE // 10)]
    assert [ask.num_cached_tokens for ask in asks] == [160] * len(asks)
    comparison.equal(outputs["long"], cold(long, 120))
    assert evictions(llm) > USABLE  # GUARD
    comparison.close()


@pytest.mark.parametrize("fresh", ["http"], indirect=True)
def test_shared_stays_over_http(fresh: Start) -> None:
    llm, comparison = fresh(num_blocks=USABLE), Comparison()
    stem = ids(2730, 160)
    long = stem + ids(2731, 5)
    steps = llm.stream(long, params(400))
    next(steps)
    with slowed(llm, 0.02):
        for number in range(5 * USABLE // 10):
            gen(llm, ids(2800 + number, 150))
            assert gen(llm, [*stem, 9 + number]).num_cached_tokens == 160
        assert llm.stats().gauges.num_running == 1  # GUARD: it holds the stem still
    assert evictions(llm) > USABLE  # GUARD
    comparison.equal([*steps][-1].output, cold(long, 400))
    comparison.close()


@pytest.mark.parametrize("way_out", ["evicted", "reset", "aborted", "refused"])
def test_recycled_means_forgotten(way_out: str) -> None:
    llm, comparison = start(num_blocks=USABLE), Comparison()
    prompt = ids(2740, 100)
    if way_out == "aborted":  # before a block of it is committed
        llm.engine.add_request("p", prompt, params(1))
        llm.engine.abort("p")
    elif way_out == "refused":
        with pytest.raises(ValueError, match="whole pool"):
            gen(llm, prompt + ids(2741, 16 * USABLE))
    else:
        gen(llm, prompt)
        if way_out == "reset":
            assert llm.reset_prefix_cache()
        else:
            for number in range(10):
                gen(llm, ids(2760 + number, 16 * (USABLE // 2)))
            assert evictions(llm) > 0  # GUARD
    first, second = gen(llm, prompt, 4), gen(llm, prompt, 4)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cap(100))
    comparison.equal(first, cold(prompt, 4))
    comparison.equal(second, cold(prompt, 4))
    comparison.close()


def test_duplicates(fresh: Start) -> None:
    llm, comparison = fresh(num_blocks=USABLE), Comparison()
    prompt = ids(2770, 16 * 8)  # a multiple of the block: each repeat computes its last block beside the cached one
    for output in gen_all(llm, [prompt, prompt], 1):
        comparison.equal(output, cold(prompt, 1))
    gen(llm, ids(2771, 16 * (USABLE - 8)))
    again = gen(llm, prompt)
    assert again.num_cached_tokens == cap(len(prompt))
    comparison.equal(again, cold(prompt, 1))
    comparison.close()


@pytest.mark.parametrize(("fresh", "num_requests"), [("python", 2000), ("http", 100)], indirect=["fresh"])
def test_gauges_add_up_after_each_of_many_random_requests(fresh: Start, num_requests: int) -> None:
    llm = fresh(num_blocks=USABLE)
    draw = random.Random(3)
    stems = [ids(2780 + number, draw.randrange(10, 300)) for number in range(30)]
    for number in range(num_requests):
        stem = draw.choice(stems)
        gen(llm, stem + ids(10_000 + number, draw.randrange(0, 41)))
        now = blocks(llm.stats())
        assert now.total == USABLE
        assert now.live == 0
    assert evictions(llm) > 0  # GUARD
