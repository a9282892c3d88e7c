"""HA6.1, 2 and 5 in Python: a reset tells the truth, and new weights never meet old K/V, whichever way they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from subject import Comparison, cap, cold, gen, params, start
from tiny_llama import ids, make_tiny_llama

from anaphora import LLM
from anaphora.errors import WeightsError

P = ids(2600, 85)
NAME = "model.layers.2.mlp.down_proj.weight"
NUM_TOKENS = 16


@pytest.fixture
def llm() -> LLM:
    """Over a module of its own: its weights are changed."""
    return LLM(make_tiny_llama(), block_size=16, num_blocks=256, dtype="float32", num_threads=1)


def new_model() -> Any:
    module = make_tiny_llama()
    with torch.no_grad():
        module.get_parameter(NAME).mul_(1.5)
    return module


def warm(llm: LLM) -> None:
    gen(llm, P)
    assert gen(llm, P).num_cached_tokens == cap(85) == 80  # GUARD


def test_an_idle_reset_forgets_and_counters_go_on() -> None:
    llm = start()
    warm(llm)
    before = llm.stats().counters
    assert llm.reset_prefix_cache() is True
    assert llm.stats().counters == before
    assert gen(llm, P).num_cached_tokens == 0


@pytest.mark.parametrize("preempt_running", [False, True])
def test_a_reset_while_one_decodes(preempt_running: bool) -> None:
    llm, comparison, long = start(), Comparison(), P + ids(2601, 40)
    warm(llm)
    stream = llm.stream(long, params(300))
    for _ in range(20):
        next(stream)
    live = llm.stats().gauges.num_live_blocks
    assert llm.reset_prefix_cache(preempt_running) is preempt_running
    assert preempt_running or llm.stats().gauges.num_live_blocks == live
    before = llm.stats().counters.num_recomputed_tokens
    assert gen(llm, P).num_cached_tokens == 80  # by then, of what the running one has computed again
    recomputed = llm.stats().counters.num_recomputed_tokens - before
    assert recomputed == (125 + 19 if preempt_running else 0)
    *_, last = stream
    assert last.output is not None
    comparison.equal(last.output, cold(long, 300))
    comparison.close()
    assert gen(llm, P).num_cached_tokens == 80  # of what was computed since
    assert llm.stats().gauges.num_live_blocks == 0


def by_dict(llm: LLM, module: Any) -> None:
    llm.update_weights({NAME: module.state_dict()[NAME]})


def by_pairs(llm: LLM, module: Any) -> None:
    llm.update_weights((name, tensor) for name, tensor in module.state_dict().items() if name == NAME)


def by_whole_state(llm: LLM, module: Any) -> None:
    llm.update_weights(module.state_dict())


def by_step_engine(llm: LLM, module: Any) -> None:
    llm.engine.update_weights({NAME: module.get_parameter(NAME)})


@pytest.mark.parametrize("change", [by_dict, by_pairs, by_whole_state, by_step_engine])
def test_new_weights_miss_and_equal_a_cold_run_of_the_new_model(llm: LLM, change: Callable[[LLM, Any], None]) -> None:
    warm(llm)
    old = gen(llm, P, NUM_TOKENS)
    change(llm, new_model())
    after = gen(llm, P, NUM_TOKENS)
    assert after.num_cached_tokens == 0
    is_new(after, old)
    assert gen(llm, P).num_cached_tokens == 80


def is_new(output: Any, old: Any) -> None:
    comparison = Comparison()
    comparison.equal(output, gen(LLM(new_model(), num_blocks=64, enable_prefix_caching=False), P, NUM_TOKENS))
    comparison.close()
    first, last = (one.outputs[0].logprobs[0] for one in (old, output))
    shared = first.keys() & last.keys()
    assert not shared or max(abs(first[token].logprob - last[token].logprob) for token in shared) > 1e-2  # GUARD


def in_place(module: Any) -> None:
    with torch.no_grad():
        module.get_parameter(NAME).mul_(1.5)


def by_state_dict(module: Any) -> None:
    module.load_state_dict(new_model().state_dict())


def by_replacement(module: Any) -> None:
    layer = module.get_submodule(NAME.removesuffix(".weight"))
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)


@pytest.mark.parametrize("write", [in_place, by_state_dict, by_replacement])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_weights_that_are_written_to_behind_the_engines_back_are_told_and_never_meet_what_is_cached(
    write: Callable[[Any], None], fast_forward: bool
) -> None:
    module = make_tiny_llama()
    llm = LLM(module, block_size=16, num_blocks=256, num_threads=1, fast_forward=fast_forward)
    warm(llm)
    old = gen(llm, P, NUM_TOKENS)
    write(module)
    for _ in range(2):
        assert "behind the engine's back" in str(gen(llm, P).error)
    llm.update_weights({NAME: new_model().state_dict()[NAME]})
    after = gen(llm, P, NUM_TOKENS)
    assert after.num_cached_tokens == 0
    is_new(after, old)
    assert llm.stats().gauges.num_live_blocks == 0


def test_the_root_tells_what_was_written_behind_the_engines_back_apart(llm: LLM) -> None:
    roots = {llm.engine.root}
    for factor in (1.5, 2.0):
        module = make_tiny_llama()
        other = LLM(module, num_blocks=64)
        with torch.no_grad():
            module.lm_head.weight.mul_(factor)
        roots.add(other.update_weights({NAME: new_model().state_dict()[NAME]}))
    roots.add(llm.update_weights({NAME: new_model().state_dict()[NAME]}))
    assert len(roots) == 4


def test_an_update_that_does_not_fit_changes_nothing(llm: LLM) -> None:
    warm(llm)
    with pytest.raises(WeightsError):
        llm.update_weights({NAME: new_model().state_dict()[NAME], "lm_head.weight": torch.zeros(3)})
    assert gen(llm, P).num_cached_tokens == 80
