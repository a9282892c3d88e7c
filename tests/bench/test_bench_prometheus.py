"""What the metrics of well-known servers mean."""

from __future__ import annotations

from anaphora.bench.prometheus import known_counters, parse, pool_tokens

VLLM = """# HELP vllm:prefix_cache_queries_total Prefix cache queries.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="a b"} 96.0
vllm:prefix_cache_queries_total{engine="1",model_name="a b"} 4.0
vllm:prefix_cache_queries_created{engine="0",model_name="a b"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 64.0
vllm:num_preemptions_total{engine="0",model_name="a b"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="a b"} 1.0e2
vllm:generation_tokens_total{engine="0",model_name="a b"} 3.0
vllm:cache_config_info{block_size="32",num_gpu_blocks="264",sliding_window="None"} 1.0
"""


def test_vllms_counters_are_summed_over_their_engines() -> None:
    assert known_counters(parse(VLLM)) == {
        "queried_tokens": 100,
        "hit_tokens": 64,
        "prompt_tokens": 100,
        "generated_tokens": 3,
        "preemptions": 0,
    }
    assert pool_tokens(parse(VLLM)) == 264 * 32


def test_sglang_and_llama_cpp_name_what_they_count() -> None:
    sglang = 'sglang:prompt_tokens_total{m="x"} 9\nsglang:cached_tokens_total{m="x",cache_source="device"} 5\n'
    assert known_counters(parse(sglang)) == {"hit_tokens": 5, "prompt_tokens": 9}
    llama = "llamacpp:prompt_tokens_total 7\nllamacpp:tokens_predicted_total 2\n"
    assert known_counters(parse(llama)) == {"computed_prompt_tokens": 7, "generated_tokens": 2}
    assert pool_tokens(parse(llama)) is None


def test_what_is_no_metric_counts_as_none() -> None:
    assert known_counters(parse("<html>not found</html>\nother_total 3\nvllm:prompt_tokens_total oops\n")) is None
    assert parse("") == []
