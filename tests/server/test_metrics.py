"""Usage and counters tell one story."""

from __future__ import annotations

from typing import Any

import pytest
from server_world import Live, cached, chunks
from tiny_llama import ids

COUNTERS = ("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_computed_total")


def by_completion(live: Live, stream: bool) -> Any:
    body = {"prompt": ids(2500, 200), "max_tokens": 2, "temperature": 0}
    if not stream:
        return live.post("/v1/completions", **body)
    return chunks(live, **body, stream_options={"include_usage": True})[-1]


def by_chat(live: Live, stream: bool) -> Any:
    body = {"messages": [{"role": "user", "content": "y" * 190}], "max_tokens": 2, "temperature": 0}
    if not stream:
        return live.post("/v1/chat/completions", **body)
    return chunks(live, "/v1/chat/completions", **body, stream_options={"include_usage": True})[-1]


@pytest.mark.parametrize("ask", [by_completion, by_chat])
@pytest.mark.parametrize("stream", [False, True])
def test_queries_rise_by_the_prompt_hits_by_the_hit_and_computed_by_the_rest(
    live: Live, ask: Any, stream: bool
) -> None:
    live.reset()
    for is_warm in (False, True):
        before = live.metrics()
        usage = ask(live, stream)["usage"]
        after = live.metrics()
        length, hit = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        assert hit == (16 * ((length - 1) // 16) if is_warm else 0)
        assert [after[name] - before[name] for name in COUNTERS] == [length, hit, length - hit]
        assert after["generation_tokens_total"] - before["generation_tokens_total"] == 2


def test_after_many_prompts_everything_is_cached_or_free_and_a_large_one_still_fits(live: Live) -> None:
    for index in range(30):
        live.generate(ids(index, 150), 1)
    metrics = live.metrics()
    blocks = [metrics[f'kv_blocks{{state="{state}"}}'] for state in ("live", "cached", "free")]
    assert blocks[0] == 0
    assert blocks[1] > 200
    assert sum(blocks) == 256
    assert metrics["kv_cache_usage_perc"] == 0
    assert metrics["evicted_blocks_total"] > 0
    large = live.generate(ids(99, 4000), 1)
    assert large["choices"][0]["finish_reason"] == "length"
    assert cached(large) == 0


def test_histograms_count_requests_and_tokens(live: Live) -> None:
    before = live.metrics()
    live.generate(ids(1, 20), 5, n=2)
    after = live.metrics()
    rise = {name: after[name] - before.get(name, 0) for name in after}
    assert rise["time_to_first_token_seconds_count"] == 2
    assert rise["inter_token_latency_seconds_count"] == 8
    assert rise["e2e_request_latency_seconds_count"] == 2
    assert rise["request_queue_time_seconds_count"] == 2
    assert rise["request_tokenize_time_seconds_count"] == 1
    assert rise['http_requests_total{endpoint="completions",outcome="finished"}'] == 1


def test_outcomes_are_told_apart(live: Live) -> None:
    before = live.metrics()
    live.post("/v1/completions", 400, prompt=[])
    after = live.metrics()
    name = 'http_requests_total{endpoint="completions",outcome="refused"}'
    assert after[name] - before.get(name, 0) == 1


def test_models_and_version(live: Live) -> None:
    (model,) = live.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 4096)
    assert live.client.get("/version").json()["root"] == live.engine.root.hex()
