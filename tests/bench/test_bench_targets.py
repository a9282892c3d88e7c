"""An engine in this process, our own server and a server of the oldest kind: one contract, the same hits."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from server_world import Live
from strict_server import strict_server

import anaphora.bench
from anaphora.bench.engine_target import EngineTarget
from anaphora.bench.http_client import Server
from anaphora.bench.http_target import HttpTarget
from anaphora.bench.measurement import BenchRequest, Target
from anaphora.config import EngineConfig
from anaphora.errors import BenchError, ConfigError
from anaphora.runtime.model import LoadedModel

PARTS = {"receive", "tokenize", "queue", "lookup", "follow", "compute", "sample", "other"}


@pytest.fixture(params=["engine", "server"])
def target(request: pytest.FixtureRequest, loaded_tiny: LoadedModel) -> Target:
    if request.param == "engine":
        config = EngineConfig(loaded_tiny.module, tokenizer=loaded_tiny.tokenizer, num_threads=1)
        made: Target = EngineTarget("ours", config, loaded_tiny)
    else:
        live: Live = request.getfixturevalue("bench_server")
        server = HttpTarget("ours", Server(live.url))
        server.open([8, 9, 10])
        made = server
    made.begin(1024)
    made.reset()
    return made


def test_a_repeat_hits_and_replies_and_counters_agree(target: Target) -> None:
    request = BenchRequest(tuple(range(8, 108)), 4)
    before = target.counters()
    (cold,), (hit,) = target.run([request])[1], target.run([request])[1]
    after = target.counters()
    assert [(s.prompt_tokens, s.cached_tokens, s.output_tokens) for s in (cold, hit)] == [(100, 0, 4), (100, 96, 4)]
    assert before is not None and after is not None
    moved = {name: after[name] - before[name] for name in ("queried_tokens", "hit_tokens", "computed_prompt_tokens")}
    assert moved == {"queried_tokens": 200, "hit_tokens": 96, "computed_prompt_tokens": 104}
    assert after["generated_tokens"] - before["generated_tokens"] == 8
    assert target.pool_tokens == 1024


def test_times_are_in_order_and_the_parts_are_the_targets_own(target: Target) -> None:
    duration_s, (sample,) = target.run([BenchRequest(tuple(range(8, 40)), 6)])
    assert sample.error is None and sample.is_reported
    assert 0 < sample.ttft_s < sample.e2e_s <= duration_s
    assert sum(sample.gaps_s) == pytest.approx(sample.e2e_s - sample.ttft_s, abs=0.02)
    assert len(sample.token_gaps_s) == 5
    assert sample.parts_s.keys() == PARTS
    assert 0 < sum(sample.parts_s.values()) < sample.e2e_s


def test_requests_of_one_wave_share_what_the_first_computes(target: Target) -> None:
    shared = tuple(range(8, 72))
    requests = [BenchRequest((*shared, 100 + index, *range(200, 215)), 2) for index in range(4)]
    _, samples = target.run(requests)
    assert sorted(sample.cached_tokens or 0 for sample in samples) == [0, 64, 64, 64]


def test_salts_and_resets_reach_the_cache(target: Target) -> None:
    prompt = tuple(range(8, 72))
    hits = [target.run([BenchRequest(prompt, 1, salt)])[1][0].cached_tokens for salt in ("a", "b", "a")]
    assert hits == [0, 0, 48]
    assert target.has_salt
    assert target.reset() is True
    assert target.run([BenchRequest(prompt, 1, "a")])[1][0].cached_tokens == 0


def test_a_prompt_that_cannot_fit_is_a_sample_with_an_error(target: Target) -> None:
    good = BenchRequest((8, 9, 10), 1)
    _, (bad, fine) = target.run([BenchRequest(tuple([9] * 2000), 1), good])
    assert bad.error is not None and fine.error is None


def test_an_engine_target_begins_anew_with_the_pool_it_is_told(loaded_tiny: LoadedModel) -> None:
    config = EngineConfig(loaded_tiny.module, tokenizer=loaded_tiny.tokenizer, num_threads=1)
    target = EngineTarget("ours", config, loaded_tiny)
    with pytest.raises(BenchError, match="call begin first"):
        target.reset()
    request = BenchRequest(tuple(range(8, 72)), 1)
    found = []
    for pool in (300, 500):
        target.begin(pool)
        found.append((target.pool_tokens, target.run([request])[1][0].cached_tokens))
    assert found == [(304, 0), (512, 0)]


def test_a_server_says_what_it_is(bench_server: Live) -> None:
    target = HttpTarget("ours", Server(bench_server.url + "/v1"), pool_tokens=7)  # its metrics know better
    target.open([8, 9, 10])
    said = target.describe()
    assert said["prompts"] == "token ids"
    assert set(said["takes"]) == {"cache_salt", "ignore_eos", "return_timings", "stream_options"}
    assert (said["can_reset"], said["pool_tokens"]) == (True, 1024)
    assert said["version"].keys() == {"version", "root", "identity"}


def test_a_server_of_the_oldest_kind_gets_text_and_what_it_does_not_say_stays_unknown() -> None:
    with strict_server() as (url, prompts):
        target = HttpTarget("old", Server(url, api_key="secret"), pool_tokens=7)
        target.open([8, 9, 10])
        said = target.describe()
        assert (said["model"], said["prompts"], said["takes"]) == ("old", "text", [])
        assert (said["can_reset"], said["pool_tokens"], target.has_salt) == (False, 7, False)
        assert target.counters() is None
        assert "secret" not in str(said)
        prompts.clear()
        _, samples = target.run([BenchRequest(tuple(range(50)), 3), BenchRequest(tuple(range(300)), 1)])
        assert [len(prompt.split()) for prompt in prompts] == [50]
        fine, long = samples
        assert (fine.prompt_tokens, fine.cached_tokens, fine.output_tokens, fine.is_reported) == (50, None, 3, False)
        assert len(fine.gaps_s) == 2
        assert long.error == "400: too long"
        with pytest.raises(BenchError, match=r"completes no text \(401: no key\)"):
            HttpTarget("old", Server(url, api_key="wrong")).open([8])


def test_a_server_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    with strict_server() as (url, _):
        pass
    with pytest.raises(BenchError, match="start it, then run the same command again"):
        HttpTarget("gone", Server(url, timeout_s=5)).open([8])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:b", "http://a?x=1", "http://u:p@a"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Server(url)


def test_addresses_with_and_without_a_path_lead_to_the_same_server() -> None:
    paths = {url: (Server(url).api_path, Server(url).root_path) for url in ("http://a", "http://a/v1/", "http://a/v3")}
    assert paths == {"http://a": ("/v1", ""), "http://a/v1/": ("/v1", ""), "http://a/v3": ("/v3", "")}


def test_the_http_side_needs_no_engine() -> None:
    folder = Path(anaphora.bench.__file__).parent
    wanted = {"anaphora.errors", "anaphora.bench"}
    for path in (folder / "http_target.py", folder / "http_client.py", folder / "prometheus.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anaphora"):
                assert any((node.module or "").startswith(name) for name in wanted), f"{path.name}: {node.module}"
                assert "engine" not in (node.module or "")
