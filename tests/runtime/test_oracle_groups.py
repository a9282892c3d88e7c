"""The one oracle for models of several groups: cache on == cache off == `transformers`, through the whole engine."""

from __future__ import annotations

import pytest
from test_oracle import is_exact, run
from tiny_llama import ids
from windowed_models import FAMILIES

from anaphora import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)


def llm(family: str, size: int, **options: object) -> LLM:
    return LLM(FAMILIES[family](size), **{"block_size": 4, "num_blocks": 2048, "max_num_seqs": 8} | options)


@pytest.mark.parametrize(
    ("family", "size", "budget", "num_blocks"),
    [
        ("mistral", 10, 33, 2048),
        ("mistral", 10, 512, 24),
        ("gemma3", 10, 512, 300),
        ("gpt_oss", 7, 33, 100),
        ("llama4", 12, 512, 120),
    ],
)
def test_every_output_is_what_transformers_gives(family: str, size: int, budget: int, num_blocks: int) -> None:
    """Small pools preempt and evict; in a large one, nothing is computed twice that need not be."""
    engine = llm(family, size, max_num_batched_tokens=budget, num_blocks=num_blocks)
    reference, outputs = FAMILIES[family](size), run(engine, seed=budget)
    assert len(outputs) == 24
    for output in outputs:
        is_exact(reference, output)
    counters, gauges = engine.stats().counters, engine.stats().gauges
    assert counters.num_hit_tokens > 0
    assert (counters.num_preemptions > 0 or counters.num_evicted_blocks > 0) == (num_blocks < 2048)
    assert gauges.num_live_blocks == 0


@pytest.mark.parametrize(
    ("family", "size"), [("mistral", 5), ("llama4", 8), ("llama4", 5), ("gemma3", 10), ("gpt_oss", 8), ("qwen3", 100)]
)
def test_the_hit_is_all_that_two_prompts_share_and_both_are_exact(family: str, size: int) -> None:
    """A sweep of where they part, over every border of blocks, windows and chunks up to 40 tokens."""
    reference, engine = FAMILIES[family](size), llm(family, size)
    stem, two = ids(1, 40), SamplingParams(max_tokens=2, temperature=0.0, logprobs=1)
    engine.generate(stem, SamplingParams(max_tokens=1))
    hits = []
    for parting in range(1, 40):
        (output,) = engine.generate([*stem[:parting], *ids(parting, 3)], two)
        is_exact(reference, output)
        hits.append(output.num_cached_tokens)
    assert hits == [parting // 4 * 4 for parting in range(1, 40)]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_identical_requests_give_one_answer(family: str) -> None:
    engine = llm(family, 6)
    together = engine.generate([ids(1, 30)] * 3, GREEDY)
    after = [engine.generate(ids(1, 30), GREEDY)[0] for _ in range(3)]
    assert [output.num_cached_tokens for output in after] == [28] * 3
    assert len({tuple(output.outputs[0].token_ids) for output in (*together, *after)}) == 1
