"""The oracle for models with recurrent layers: cache on == cache off == `transformers`, through the whole engine."""

from __future__ import annotations

import pytest
from recurrent_models import FAMILIES
from test_oracle import is_exact, run
from tiny_llama import ids

from anaphora import LLM, SamplingParams
from anaphora.runtime.state_cache import StateCache

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
ONE = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)


def llm(family: str, **options: object) -> LLM:
    defaults = {"block_size": 4, "num_blocks": 2048, "max_num_seqs": 8, "num_state_slots": 400}
    return LLM(FAMILIES[family](), **defaults | options)


@pytest.mark.parametrize(
    ("family", "budget", "num_blocks", "num_slots"),
    [
        ("lfm2", 33, 2048, 400),
        ("lfm2", 512, 60, 12),
        ("qwen3_next", 33, 300, 40),
        ("jamba", 512, 300, 40),
        ("falcon_h1", 33, 300, 400),
        ("mamba2", 33, 300, 40),
    ],
)
def test_every_output_is_what_transformers_gives(family: str, budget: int, num_blocks: int, num_slots: int) -> None:
    engine = llm(family, max_num_batched_tokens=budget, num_blocks=num_blocks, num_state_slots=num_slots)
    reference, outputs = FAMILIES[family](), run(engine, seed=budget)
    assert len(outputs) == 24
    for output in outputs:
        is_exact(reference, output)
    assert engine.stats().counters.num_hit_tokens > 0
    assert engine.stats().gauges.num_live_blocks == 0


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "mamba2"])
def test_a_shared_beginning_hits_from_its_second_use_within_the_interval_and_wholly_from_its_third(family: str) -> None:
    """A sweep of where prompts part. The first hit is at the last multiple of the interval (here 8 tokens)."""
    reference, engine = FAMILIES[family](), llm(family, state_checkpoint_interval=8)
    for parting in range(1, 34, 3):
        stem = ids(parting, 34)[:parting]
        hits = []
        for use in range(4):
            (output,) = engine.generate([*stem, *ids(100 * parting + use, 7)], ONE)
            is_exact(reference, output)
            hits.append(output.num_cached_tokens)
        # What a prompt shares with the one before it may go on a little by chance: never with these seeds.
        assert hits == [0, parting // 8 * 8, parting // 4 * 4, parting // 4 * 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_identical_requests_give_one_answer_and_a_turn_goes_on_where_it_ended(family: str) -> None:
    reference, engine = FAMILIES[family](), llm(family)
    together = engine.generate([ids(1, 30)] * 3, GREEDY)
    after = [engine.generate(ids(1, 30), GREEDY)[0] for _ in range(3)]
    assert [output.num_cached_tokens for output in after] == [28] * 3
    assert len({tuple(output.outputs[0].token_ids) for output in (*together, *after)}) == 1
    turn = [*ids(1, 30), *after[0].outputs[0].token_ids, *ids(9, 5)]
    (output,) = engine.generate(turn, GREEDY)
    is_exact(reference, output)
    assert output.num_cached_tokens == 36  # 30 + 8 tokens, the last of which was never computed: nine whole blocks


def test_with_caching_off_nothing_is_cached_and_everything_is_right() -> None:
    reference, engine = FAMILIES["lfm2"](), llm("lfm2", enable_prefix_caching=False)
    for _ in range(2):
        (output,) = engine.generate(ids(1, 30), GREEDY)
        is_exact(reference, output)
        assert output.num_cached_tokens == 0


def test_a_recurrent_layer_keeps_the_forward_that_its_owner_gave_it() -> None:
    module = FAMILIES["lfm2"]()
    layer = module.model.layers[0].conv
    own, num_calls = layer.forward, 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal num_calls
        num_calls += 1
        return own(*args, **kwargs)

    layer.forward = counted
    engine = LLM(module, block_size=4, num_blocks=64)
    num_before = num_calls
    for seed in (1, 2):
        engine.generate(ids(seed, 6), ONE)
        assert layer.forward is counted
    assert num_calls > num_before


def test_with_one_slot_the_last_prompt_hits_and_every_other_one_is_right() -> None:
    reference, engine = FAMILIES["qwen3_next"](), llm("qwen3_next", num_state_slots=1)
    hits = []
    for seed in (1, 1, 2, 1, 1):
        (output,) = engine.generate(ids(seed, 30), ONE)
        is_exact(reference, output)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 28, 0, 0, 28]


def test_a_state_that_is_not_finite_ends_its_request_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have overflowed behind outputs that are still finite."""
    engine = llm("lfm2")
    with monkeypatch.context() as patch:
        patch.setattr(StateCache, "is_finite", lambda self, row: False)
        engine.engine.add_request("bad", ids(1, 30), ONE)
        (step,) = [step for step in iter(lambda: engine.engine.step(), []) for step in step]
        assert step.output is not None and step.output.outputs[0].finish_reason == "error"
    (output,) = engine.generate(ids(1, 30), ONE)
    assert output.num_cached_tokens == 0
    is_exact(FAMILIES["lfm2"](), output)
