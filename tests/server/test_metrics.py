"""Usage and counters tell one story."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_world import PATIENCE_S, Live, cached, chunks, serving
from tiny_llama import ids

from anaphora.cli.options import EngineOptions
from anaphora.cli.serve import ServerOptions
from anaphora.core.hashing import root_digest
from anaphora.server.config import ServerConfig
from anaphora.server.fields import ChatFields, CompletionFields, ResponsesFields
from anaphora.server.generation import _Exchange

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


def by_response(live: Live, stream: bool) -> Any:
    body = {"input": "y" * 190, "max_output_tokens": 2, "temperature": 0, "stream": stream}
    reply = live.client.post("/v1/responses", json=body)
    last = json.loads(reply.text.rsplit("data: ", 1)[1])["response"] if stream else reply.json()
    usage = last["usage"]
    return {"usage": {"prompt_tokens": usage["input_tokens"], "prompt_tokens_details": usage["input_tokens_details"]}}


@pytest.mark.parametrize("ask", [by_completion, by_chat, by_response])
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


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_has_a_reply_finds_it_counted_and_its_place_free(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    until_gone = _Exchange._until_gone

    async def returns_late(self: Any, work: Any) -> None:
        await until_gone(self, work)
        await asyncio.sleep(0.1)

    monkeypatch.setattr(_Exchange, "_until_gone", returns_late)
    with serving(make_engine(), ServerConfig(max_queue=0), max_num_seqs=1) as live:
        for number in range(1, 4):
            by_completion(live, stream)
            assert live.metrics()["e2e_request_latency_seconds_count"] == number


def test_histograms_count_requests_and_tokens(live: Live) -> None:
    before = live.metrics()
    live.generate(ids(1, 20), 5, n=2)
    after = live.metrics()
    rise = {name: after[name] - before.get(name, 0) for name in after}
    assert rise["time_to_first_token_seconds_count"] == 2
    assert rise["inter_token_latency_seconds_count"] == 8
    assert rise["e2e_request_latency_seconds_count"] == 2
    parts = ("receive", "tokenize", "queue", "lookup", "follow", "compute", "sample", "other")
    for part in parts:
        assert rise[f'time_to_first_token_part_seconds_count{{part="{part}"}}'] == 2
    total = sum(rise[f'time_to_first_token_part_seconds_sum{{part="{part}"}}'] for part in parts)
    assert abs(total - rise["time_to_first_token_seconds_sum"]) < 1e-6
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
    shown = live.client.get("/version").json()
    assert shown["root"] == live.engine.root.hex() == root_digest(shown["identity"]).hex()


def test_a_request_that_waits_is_looked_up_once(make_engine: Any) -> None:
    with serving(make_engine(num_blocks=20)) as live:
        live.reset()
        body = {"prompt": ids(1, 200), "max_tokens": 110, "temperature": 0}
        replies: list[Any] = []

        def run(wanted: dict[str, Any]) -> None:
            with httpx2.Client(base_url=live.url, timeout=PATIENCE_S) as client:
                replies.append(client.post("/v1/completions", json=wanted).json())

        executor: Any = live.engine._executor
        execute = executor.execute
        seen = threading.Event()
        executor.execute = lambda plan: (seen.wait(0.04), execute(plan))[1]  # slow until the scrapes are done
        first = threading.Thread(target=run, args=(body,))
        first.start()
        while live.metrics()["num_requests_running"] != 1:
            time.sleep(0.005)
        before = live.metrics()
        second = threading.Thread(target=run, args=({**body, "prompt": ids(2500, 200), "max_tokens": 1},))
        second.start()
        while live.metrics()["num_requests_waiting"] != 1:
            time.sleep(0.005)
        scrapes = [live.metrics() for _ in range(50)]
        seen.set()
        assert all(scrape["num_requests_waiting"] == 1 for scrape in scrapes)
        first.join(PATIENCE_S)
        second.join(PATIENCE_S)
        after = live.metrics()
        assert [after[name] - before[name] for name in COUNTERS] == [200, 0, 200]
        assert all(s["prefix_cache_hits_total"] <= s["prefix_cache_queries_total"] for s in scrapes)


# -- documented --------------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"


def test_every_metric_is_documented_and_every_documented_metric_is_there(live: Live) -> None:
    live.generate([8, 9], 2)
    live.metrics()
    families = re.findall(r"# TYPE anaphora:(\S+) (\w+)", live.client.get("/metrics").text)
    real = {name for name, kind in families if not name.endswith("_created")}
    table = (DOCS / "operations.md").read_text().split("## Metrics")[1].split("Useful alerts")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    written = {name.partition("{")[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert written == real


def test_every_field_and_option_is_documented() -> None:
    text = (DOCS / "server.md").read_text()
    fields = {*CompletionFields.model_fields, *ChatFields.model_fields, *ResponsesFields.model_fields}
    assert [name for name in sorted(fields) if f"`{name}`" not in text and f"`{name}." not in text] == []
    names = {*ServerOptions.__dataclass_fields__, *EngineOptions.__dataclass_fields__} - {"enable_prefix_caching"}
    flags = {"prefix-caching", *(name.replace("_", "-").removesuffix("-s") for name in names)}
    assert [flag for flag in sorted(flags) if f"`--{flag}`" not in text] == []
