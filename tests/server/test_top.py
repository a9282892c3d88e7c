"""`anaphora top` and what it reads: the pool, the curve, pins and the busiest beginnings of a server that runs."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from server_world import Live, serving
from tiny_llama import ids

from anaphora.cli.main import main
from anaphora.cli.running_server import RunningServer
from anaphora.cli.top import view
from anaphora.cli.top_snapshot import Snapshot, hit_rate, parse_samples, rate, snapshot_of, ttft_percentile
from anaphora.errors import ConfigError, ServerUnreachableError
from anaphora.server.tenants import ApiKeys, Caller

POOLS = ["0.5x", "1x", "2x", "4x"]


@pytest.fixture
def fresh(make_engine: Any) -> Iterator[Live]:
    with serving(make_engine(num_blocks=40)) as live:
        yield live


@pytest.fixture(scope="module")
def keyed(make_engine: Any) -> Iterator[Live]:
    keys = ApiKeys([("key-root", Caller("ops", is_admin=True)), ("key-a", Caller("anna", is_admin=False))])
    with serving(make_engine(num_blocks=64), api_keys=keys) as live:
        yield live


def test_the_curve_says_what_a_pool_of_twice_the_size_would_have_found(fresh: Live) -> None:
    """Three prompts of 20 blocks in turn: 40 blocks find nothing, 80 all but the last token's block."""
    for _ in range(4):
        for seed in range(3):
            assert fresh.hit(ids(seed, 20 * 16 + 1)) == 0
    metrics = fresh.metrics()
    queried = 12 * (20 * 16 + 1)
    rates = [metrics[f'what_if_hit_rate{{pool="{pool}"}}'] for pool in POOLS]
    assert rates == [0, 0, 9 * 20 * 16 / queried, 9 * 20 * 16 / queried]
    assert fresh.engine.stats().what_if[1].num_queried_tokens == queried


def test_a_pinned_prompt_survives_traffic_that_evicts_everything_else(fresh: Live) -> None:
    pinned, loose = ids(1, 8 * 16 + 1), ids(2, 8 * 16 + 1)
    fresh.generate(pinned, 1, cache_priority=2, pin_ttl_s=60)
    fresh.generate(loose, 1)
    assert fresh.metrics()["kv_pinned_blocks"] == 8
    for seed in range(10, 20):
        fresh.generate(ids(seed, 20 * 16), 1)
    assert (fresh.hit(loose), fresh.hit(pinned)) == (0, 8 * 16)


@pytest.mark.parametrize(("field", "value"), [("cache_priority", 10), ("pin_ttl_s", 0), ("pin_ttl_s", -1.5)])
def test_a_wrong_pin_is_a_400_that_names_its_field(live: Live, field: str, value: float) -> None:
    error = live.post("/v1/completions", 400, prompt=[9, 8], max_tokens=1, **{field: value})["error"]
    assert error["param"] == field


def test_a_tenant_pins_its_share_and_no_more(keyed: Live) -> None:
    for seed in range(4):
        body = {"prompt": ids(seed, 10 * 16 + 1), "max_tokens": 1, "temperature": 0, "cache_priority": 9}
        keyed.post("/v1/completions", headers={"Authorization": "Bearer key-a"}, **body)
    assert keyed.engine.stats().gauges.num_pinned_blocks == 64 // 4


def test_the_busiest_beginnings_are_named_by_hash_and_for_admins_only(keyed: Live) -> None:
    root, anna = ({"Authorization": f"Bearer {key}"} for key in ("key-root", "key-a"))
    keyed.post("/reset_prefix_cache", headers=root)
    prompt = "in the beginning was the word" * 3
    for _ in range(3):
        keyed.post("/v1/completions", headers=anna, prompt=prompt, max_tokens=1)
    reply = keyed.client.get("/debug/prefixes", headers=root)
    (row,) = [row for row in reply.json()["prefixes"] if row["num_requests"] == 2]
    assert row == {"hash": row["hash"], "num_tokens": 80, "num_requests": 2, "num_hit_tokens": 160}
    assert len(row["hash"]) == 16 and int(row["hash"], 16)
    assert "word" not in reply.text
    assert keyed.client.get("/debug/prefixes", headers=anna).status_code == 403
    assert keyed.client.get("/debug/prefixes").status_code == 401


def test_once_prints_a_snapshot(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    live.reset()
    for _ in range(3):
        live.generate(ids(77, 100), 2)
    assert main(["top", live.url, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"anaphora top  {live.url}   running 0   waiting 0")
    rows = {line.split("  ")[0]: line.split() for line in lines if line}
    assert rows["live"][:3] == ["live", "0", "0.0%"]
    assert rows["what if the pool were"][-4:] == POOLS
    assert rows["first token, p99"][3].isdigit()
    assert any(len(line.split()[0]) == 16 and line.split()[1] == "96" for line in lines if line)


def test_json_is_one_document(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    live.reset()
    live.generate(ids(78, 100), 2)
    assert main(["top", live.url + "/v1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(document["blocks"].values()) == 256
    assert list(document["what_if"]) == POOLS
    assert 0 < document["hit_rate"] < 1
    assert 0 < document["ttft_s"]["p50"] <= document["ttft_s"]["p99"]


def test_a_server_with_keys_wants_an_admins(
    keyed: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ([], ["--api-key", "key-a"]):
        assert main(["top", keyed.url, "--once", *options]) == 2
        assert "give an admin's --api-key" in capsys.readouterr().err
    monkeypatch.setenv("ANAPHORA_API_KEY", "key-root")
    assert main(["top", keyed.url, "--once"]) == 0


def test_a_server_that_is_away_or_another_one_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "http://127.0.0.1:9", "--once"]) == 1
    assert "http://127.0.0.1:9 does not answer (" in capsys.readouterr().err
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=other.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.raises(ServerUnreachableError, match="answers 404 and is no Anaphora server"):
            snapshot_of(RunningServer(f"http://127.0.0.1:{other.server_port}"))
    finally:
        other.shutdown()
        other.server_close()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "file:///etc/passwd"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        RunningServer(url)


def test_a_wrong_interval_or_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "http://127.0.0.1:9", "--interval", "0"]) == 2
    assert "--interval must be from 0.1 to 3600" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no header can carry"):
        RunningServer("http://127.0.0.1:9", api_key="a\nb")


def snapshot(taken_s: float, **samples: float) -> Snapshot:
    buckets = {"0.1": samples.pop("b1", 0.0), "0.2": samples.pop("b2", 0.0), "+Inf": samples.pop("inf", 0.0)}
    named = {f'time_to_first_token_seconds_bucket{{le="{bound}"}}': value for bound, value in buckets.items()}
    return Snapshot(taken_s, named | samples, None)


def test_now_is_the_difference_of_two_snapshots() -> None:
    earlier = snapshot(10, prefix_cache_queries_total=100, prefix_cache_hits_total=90, b1=4, b2=4, inf=4)
    now = snapshot(12, prefix_cache_queries_total=200, prefix_cache_hits_total=100, b1=4, b2=8, inf=9)
    assert (hit_rate(now), hit_rate(now, earlier), hit_rate(now, now)) == (0.5, 0.1, None)
    assert rate("prefix_cache_queries_total", now, earlier) == 50
    assert ttft_percentile(0.4, now, earlier) == pytest.approx(0.15)
    assert ttft_percentile(0.99, now, earlier) == 0.2  # beyond the last bound
    assert ttft_percentile(0.5, earlier) == pytest.approx(0.05)
    assert ttft_percentile(0.5, now, now) is None
    view("http://h", now, earlier)


def test_samples_of_others_and_broken_lines_are_left_out() -> None:
    lines = ["# HELP anaphora:x y", "anaphora:x 1", "python_gc 2", 'anaphora:y{a="b c"} 2.5', "anaphora:z many", ""]
    assert parse_samples(lines) == {"x": 1.0, 'y{a="b c"}': 2.5}
