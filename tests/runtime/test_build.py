"""Claims: a config and a loaded model become one engine: cache on and off give the same, sizes are as asked."""

from __future__ import annotations

import pytest
from recurrent_models import lfm2
from tiny_llama import MAX_POSITIONS, ids, make_tiny_llama
from windowed_models import gpt_oss

from anaphora import LLM, EngineConfig, SamplingParams
from anaphora.api.build import build_engine
from anaphora.errors import ConfigError, InvalidParameterError, InvalidTokenError

MODEL = make_tiny_llama()
STEM = ids(1, 40)
PROMPTS = [[*STEM, *ids(seed, 5)] for seed in range(2, 5)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)


def llm(**options) -> LLM:
    return LLM(MODEL, **{"num_blocks": 64, "max_model_len": 256} | options)


def test_cache_on_gives_what_cache_off_gives():
    on, off = llm(), llm(enable_prefix_caching=False, max_num_batched_tokens=17)
    cold = off.generate(PROMPTS, GREEDY)
    for hits in ([0, 32, 32], [32, 32, 32]):  # at once the followers find what the first one writes; then all of it
        warm = on.generate(PROMPTS, GREEDY)
        assert [output.num_cached_tokens for output in warm] == hits
        for one, other in zip(warm, cold, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            for a, b in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
                assert list(a) == list(b)
                assert [p.logprob for p in a.values()] == pytest.approx([p.logprob for p in b.values()], abs=1e-4)
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0]


def test_num_blocks_are_usable_blocks():
    engine = llm(num_blocks=5, block_size=8)
    assert engine.stats().gauges.num_total_blocks == 5
    (output,) = engine.generate(ids(9, 40), GREEDY)  # fills all five
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 1)


def test_kv_cache_bytes_size_the_pool():
    bytes_per_token = 4 * 2 * 2 * 16 * 4  # layers, keys and values, K/V heads, head size, float32
    engine = llm(num_blocks=None, kv_cache_bytes=7 * 16 * bytes_per_token)
    assert engine.stats().gauges.num_total_blocks == 7


def test_the_default_pool_holds_no_more_than_its_requests_could_use():
    assert llm(num_blocks=None, max_num_seqs=3).stats().gauges.num_total_blocks == 3 * 16
    engine = LLM(gpt_oss(24), max_num_seqs=3, max_model_len=256)
    assert engine.stats().gauges.num_total_blocks == 2 * 3 * 16  # two groups


@pytest.mark.parametrize(
    "options", [{"max_model_len": MAX_POSITIONS + 1}, {"num_blocks": None, "kv_cache_bytes": 10}, {"num_blocks": 0}]
)
def test_a_config_that_cannot_be_is_refused(options):
    with pytest.raises(ConfigError):
        llm(**options)


def test_the_context_limit_is_the_models():
    assert build_engine(EngineConfig(model=MODEL, num_blocks=4)).max_model_len == MAX_POSITIONS


def test_a_sliding_window_limits_no_context():
    engine = LLM(gpt_oss(24), num_blocks=60, block_size=4)
    assert engine.engine.max_model_len == 512
    (output,) = engine.generate(ids(1, 100), GREEDY)
    assert len(output.outputs[0].token_ids) == 6
    assert [group.num_cached_blocks for group in engine.stats().groups] == [26, 26]
    assert engine.engine.kv_bytes_per_token == (512, 512)
    (again,) = engine.generate(ids(1, 100), GREEDY)
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == (96, output.outputs[0].token_ids)


def test_there_is_a_what_if_curve_only_where_it_is_true():
    assert llm().stats().what_if
    assert not llm(enable_prefix_caching=False).stats().what_if
    for model in (gpt_oss(16), lfm2()):  # blocks of several groups share a pool; a state has slots of its own
        assert not LLM(model, num_blocks=64, max_model_len=256).stats().what_if


def test_a_fast_hash_finds_the_same():
    engine = llm(hash_algorithm="xxh3_128")
    hits = [engine.generate(PROMPTS[0], GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert hits == [0, 32]


def test_a_model_without_tokenizer_takes_ids_and_refuses_text():
    engine = llm()
    with pytest.raises(InvalidParameterError, match="needs a tokenizer"):
        engine.generate("text", GREEDY)
    with pytest.raises(InvalidTokenError, match="384"):
        engine.generate([384], GREEDY)
    assert engine.stats().gauges.num_live_blocks == 0
    assert len(engine.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids) == 6


def test_sampled_outputs_depend_on_the_seeds_alone():
    params = SamplingParams(max_tokens=8, temperature=1.0)
    first, again, other = (
        [output.outputs[0].token_ids for output in llm(seed=seed, **options).generate(PROMPTS, params)]
        for seed, options in ((1, {}), (1, {"max_num_seqs": 1, "enable_prefix_caching": False}), (2, {}))
    )
    assert first == again
    assert first != other
