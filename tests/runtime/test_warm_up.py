"""Claims: warming up runs steps of typical shapes, whatever the sizes, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hand_plans import make_executor
from tiny_llama import ids
from transformers import LlamaForCausalLM

from anaphora import LLM, SamplingParams
from anaphora.config import EngineConfig
from anaphora.core.plan import StepPlan
from anaphora.core.stats import Counters
from anaphora.errors import ConfigError
from anaphora.runtime.executor import TorchExecutor
from anaphora.runtime.warm_up import warm_up


def recorded(executor: TorchExecutor) -> list[StepPlan]:
    plans: list[StepPlan] = []
    execute = executor.execute

    def note(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    executor.execute = note  # type: ignore[method-assign]
    return plans


def assert_untouched(executor: TorchExecutor, max_num_seqs: int) -> None:
    assert not any(tensor.any() for tensor in (*executor.cache.keys, *executor.cache.values))
    assert not any(ids.any() for ids in executor._tables.ids)
    assert executor._tables.lengths.tolist() == [[0] * max_num_seqs]
    assert sorted(executor._tables._free_rows) == list(range(max_num_seqs))
    assert executor._requests == {}


def test_a_long_prompt_short_ones_and_the_next_tokens_of_all(tiny_llama: LlamaForCausalLM) -> None:
    executor = make_executor(tiny_llama, num_blocks=64, max_num_seqs=4)
    plans = recorded(executor)
    warm_up(executor, max_num_tokens=300, max_num_seqs=4)
    assert [[len(one.token_ids) for one in plan.scheduled] for plan in plans] == [[299], [1], [3] * 3, [1] * 4]
    assert [one.start for one in plans[-1].scheduled] == [299, 3, 3, 3]
    assert_untouched(executor, 4)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_blocks", [2, 3, 5, 9, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
@pytest.mark.parametrize("max_num_tokens", [1, 2, 7, 100])
def test_every_size_is_enough_for_something_and_nothing_stays(
    tiny_llama: LlamaForCausalLM, block_size: int, num_blocks: int, max_num_seqs: int, max_num_tokens: int
) -> None:
    executor = make_executor(
        tiny_llama, num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_len=128
    )
    plans = recorded(executor)
    warm_up(executor, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs)
    assert bool(plans) == (max_num_tokens > 1 and (num_blocks - 1) * block_size > 1)
    used = [block for plan in plans for one in plan.scheduled for blocks in one.new_block_ids for block in blocks]
    assert used == list(range(1, 1 + len(used)))
    assert len(used) < num_blocks
    assert max((sum(len(each.token_ids) for each in plan.scheduled) for plan in plans), default=0) <= max(
        max_num_tokens, max_num_seqs
    )
    assert_untouched(executor, max_num_seqs)


def test_what_fails_on_the_way_leaves_nothing_either(tiny_llama: LlamaForCausalLM) -> None:
    executor = make_executor(tiny_llama)
    plans = recorded(executor)
    noted = executor.execute

    def execute(plan: StepPlan) -> Any:
        result = noted(plan)
        if len(plans) == 3:
            raise MemoryError
        return result

    executor.execute = execute  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        warm_up(executor, max_num_tokens=64, max_num_seqs=4)
    assert_untouched(executor, 4)


def test_a_warm_engine_answers_and_counts_as_a_cold_one(tiny_llama: LlamaForCausalLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, logprobs=1)
    outputs = []
    for warm in (True, False, None):
        llm = LLM(tiny_llama, num_blocks=64, num_threads=1, seed=3, warm_up=warm)
        stats = llm.stats()
        assert stats.counters == Counters()
        assert (stats.gauges.num_blank_blocks, stats.gauges.num_running) == (64, 0)
        assert set(dataclasses.asdict(stats.times).values()) == {0.0}
        (output,) = llm.generate([ids(1, 40)], params)
        assert output.num_cached_tokens == 0
        outputs.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_library_warms_up_only_if_told(tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[dict[str, int]] = []
    monkeypatch.setattr("anaphora.api.build.warm_up", lambda executor, **sizes: warmed.append(sizes))
    for warm in (None, False, True):
        LLM(tiny_llama, num_blocks=64, num_threads=1, max_model_len=100, max_num_seqs=9, warm_up=warm)
    assert warmed == [{"max_num_tokens": 100, "max_num_seqs": 9}]


def test_anything_but_yes_no_and_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="warm_up"):
        EngineConfig(model="x", warm_up="yes")  # type: ignore[arg-type]
