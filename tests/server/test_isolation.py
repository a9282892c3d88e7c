"""Salts, tenants, keys: who shares with whom, and who may do what."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_world import Live, cached, chunks, serving
from tiny_llama import ids

from anaphora.errors import ConfigError
from anaphora.server.app import build_app
from anaphora.server.config import ServerConfig
from anaphora.server.tenants import ApiKeys, CacheDomains, Caller, load_api_keys

PROMPT = ids(2200, 69)
MESSAGES = [{"role": "user", "content": "x" * 60}]


def completion(live: Live, **body: Any) -> Any:
    return live.post("/v1/completions", prompt=PROMPT, max_tokens=4, temperature=0, **body)


def chat(live: Live, **body: Any) -> Any:
    return live.post("/v1/chat/completions", messages=MESSAGES, max_tokens=4, temperature=0, **body)


def streamed_completion(live: Live, **body: Any) -> Any:
    options = {"stream_options": {"include_usage": True}}
    return chunks(live, prompt=PROMPT, max_tokens=4, temperature=0, **options, **body)[-1]


def streamed_chat(live: Live, **body: Any) -> Any:
    options = {"stream_options": {"include_usage": True}}
    path = "/v1/chat/completions"
    return chunks(live, path, messages=MESSAGES, max_tokens=4, temperature=0, **options, **body)[-1]


def as_completion(response: Any) -> Any:
    """A reply of /v1/responses under the names that the others have."""
    usage = response["usage"]
    named = {"prompt_tokens": usage["input_tokens"], "prompt_tokens_details": usage["input_tokens_details"]}
    return {"choices": [part["text"] for item in response["output"] for part in item["content"]], "usage": named}


def response(live: Live, **body: Any) -> Any:
    return as_completion(live.post("/v1/responses", input="x" * 60, max_output_tokens=4, temperature=0, **body))


def streamed_response(live: Live, **body: Any) -> Any:
    values = {"input": "x" * 60, "max_output_tokens": 4, "temperature": 0, "stream": True, **body}
    text = live.client.post("/v1/responses", json=values).text
    return as_completion(json.loads(text.rsplit("data: ", 1)[1])["response"])


@pytest.mark.parametrize("ask", [completion, chat, response, streamed_completion, streamed_chat, streamed_response])
def test_salts_isolate_on_every_endpoint(live: Live, ask: Any) -> None:
    live.reset()
    replies = [ask(live, cache_salt=salt) for salt in ("a", "a", "b", "b", None, None, "a")]
    full = 16 * ((replies[0]["usage"]["prompt_tokens"] - 1) // 16)
    assert full == 64
    assert [cached(reply) for reply in replies] == [0, full, 0, full, 0, full, full]
    assert len({str(reply["choices"]) for reply in replies}) == 1
    assert cached(ask(live)) == full  # absent is null


def regions(*pairs: tuple[int, str]) -> list[dict[str, Any]]:
    return [{"start": start, "salt": salt} for start, salt in pairs]


def test_a_region_shares_the_public_beginning_and_isolates_the_private_rest(live: Live) -> None:
    live.reset()
    salts = [regions((32, "alice")), regions((32, "bob")), regions((47, "alice")), regions((32, "alice")), None]
    assert [live.hit(PROMPT, cache_salt=salt) for salt in salts] == [0, 32, 64, 64, 32]
    assert live.hit(PROMPT, cache_salt=regions((0, "alice"))) == 0
    assert live.hit(PROMPT, cache_salt="alice") == 64


def test_a_salt_holds_across_endpoints_that_yield_the_same_ids(live: Live) -> None:
    live.reset()
    rendered = live.post("/tokenize", messages=MESSAGES)
    assert cached(chat(live, cache_salt="a")) == 0
    for prompt in (rendered["tokens"], rendered["prompt"]):
        assert live.hit(prompt, cache_salt="a") == 64
        assert live.hit(prompt, cache_salt="b") in (0, 64)  # its own second time
    live.reset()
    chat(live, cache_salt="a")
    assert live.hit(rendered["prompt"], cache_salt="b") == 0
    assert live.hit(rendered["prompt"]) == 0


def test_salts_that_look_alike_are_different(live: Live) -> None:
    live.reset()
    alike = ["\u00e9", "e\u0301", "\u00e9 ", "\u00c9", "\u0435\u0301", "null", "0"]
    assert [live.hit(PROMPT, cache_salt=salt) for salt in alike] == [0] * len(alike)
    assert [live.hit(PROMPT, cache_salt=salt) for salt in alike] == [64] * len(alike)


# -- keys and tenants --------------------------------------------------------------------------------------------------

KEYS = """
# a comment
key-a anna
key-a2 anna     # a second key of the same tenant
key-b berta
key-c carla
key-root ops admin
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(make_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(KEYS)
    config = ServerConfig(share_cache=(frozenset({"berta", "carla"}),))
    with serving(make_engine(), config, api_keys=load_api_keys(path), secret=b"s" * 32) as live:
        yield live


def hit_as(live: Live, key: str, **body: Any) -> int:
    values = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    return cached(live.post("/v1/completions", headers=bearer(key), **values, **body))


def test_tenants_are_isolated_unless_they_are_named_together(keyed: Live) -> None:
    assert keyed.post("/reset_prefix_cache", headers=bearer("key-root")) == {"reset": True}
    assert [hit_as(keyed, "key-a") for _ in range(2)] == [0, 64]
    assert hit_as(keyed, "key-a2") == 64  # the same tenant
    assert hit_as(keyed, "key-b") == 0
    assert hit_as(keyed, "key-c") == 64  # shares with berta by name
    assert hit_as(keyed, "key-root") == 0
    assert hit_as(keyed, "key-a", cache_salt="x") == 0
    assert hit_as(keyed, "key-a", cache_salt="x") == 64
    assert hit_as(keyed, "key-b", cache_salt="x") == 0


def test_a_tenants_regions_share_their_beginning_inside_the_tenant_alone(keyed: Live) -> None:
    assert keyed.post("/reset_prefix_cache", headers=bearer("key-root")) == {"reset": True}
    assert hit_as(keyed, "key-a", cache_salt=regions((32, "x"))) == 0
    assert hit_as(keyed, "key-b", cache_salt=regions((32, "x"))) == 0  # nothing is public across tenants
    assert hit_as(keyed, "key-a", cache_salt=regions((32, "y"))) == 32
    assert hit_as(keyed, "key-a") == 32  # as without a salt
    assert hit_as(keyed, "key-a", cache_salt=regions((0, "x"))) == 0
    assert hit_as(keyed, "key-a", cache_salt="x") == 64
    assert hit_as(keyed, "key-b", cache_salt="x") == 0
    assert hit_as(keyed, "key-a", cache_salt=regions(*((i, "x") for i in range(1, 33)))) == 0  # as many as there may be


def test_no_client_salt_reaches_another_tenant(keyed: Live) -> None:
    domains = CacheDomains(b"guess" * 8)
    assert keyed.post("/reset_prefix_cache", headers=bearer("key-root")) == {"reset": True}
    hit_as(keyed, "key-a")
    guesses = ["anna", "key-a", domains.salt(Caller("anna", False), None)]
    assert [hit_as(keyed, "key-b", cache_salt=guess) for guess in guesses] == [0, 0, 0]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
     ("POST", "/reset_prefix_cache"), ("GET", "/v1/models"), ("GET", "/version"), ("GET", "/metrics"),
     ("GET", "/v1/models/tiny"), ("POST", "/v1/responses"), ("GET", "/openapi.json")],
)  # fmt: skip
def test_nothing_but_health_answers_without_a_key(keyed: Live, method: str, path: str) -> None:
    for headers in (
        {},
        bearer("wrong"),
        {"authorization": "Bearer"},
        {"authorization": "key-a"},
        {"authorization": "Basic key-a"},
    ):
        reply = keyed.client.request(method, path, headers=headers, content=b"{}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/ready"):
        assert keyed.client.get(path).status_code == 200


def test_only_an_admin_resets_and_reads_metrics(keyed: Live) -> None:
    for key, status in (("key-a", 403), ("key-root", 200)):
        assert keyed.client.post("/reset_prefix_cache", headers=bearer(key)).status_code == status
        assert keyed.client.get("/metrics", headers=bearer(key)).status_code == status
        assert keyed.client.get("/v1/models", headers=bearer(key)).status_code == 200


def test_metrics_name_no_tenant_key_or_salt(keyed: Live) -> None:
    hit_as(keyed, "key-a", cache_salt="pepper")
    text = keyed.client.get("/metrics", headers=bearer("key-root")).text
    assert not any(word in text for word in ("anna", "key-a", "pepper"))


def test_a_domain_is_not_spelled_by_another(tmp_path: Path) -> None:
    shared = CacheDomains(b"s" * 16, [frozenset({"a", "b"})])
    pairs = [("a", None), ("a", "x"), ("c", None), ("c", "x"), ("cx", None), ("ab", None), ("shared", None)]
    salts = [shared.salt(Caller(tenant, False), salt) for tenant, salt in pairs]
    assert len(set(salts)) == len(pairs)
    assert shared.salt(Caller("a", False), "") != salts[0]
    assert shared.salt(Caller("b", False), "x") == salts[1]
    assert CacheDomains(b"t" * 16).salt(Caller("c", False), None) != salts[2]
    with pytest.raises(ConfigError):
        CacheDomains(b"short")


@pytest.mark.parametrize(
    "text",
    ["", "# nothing", "key", "key tenant boss", "k t\nk u", '{"k": 1}', '{"k": {"tenant": ""}}', '{"k": "a", "k": "b"}',
     '{"k": {"tenant": "a", "admin": 1}}', '{"k": {"tenant": "a", "x": 1}}', '{"k": "a"', '{"": "a"}', 
     "k\u00e9 tenant", '{"k e": "a"}', '{"k": ' + "[" * 100_000],
)  # fmt: skip
def test_a_wrong_key_file_is_refused_without_quoting_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_api_keys(path)
    assert "tenant boss" not in str(error.value)


def test_a_key_file_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"k1": "a", "k2": {"tenant": "b", "admin": true}}')
    keys = load_api_keys(path)
    assert (keys.find("k1"), keys.find("k2"), keys.find("k3")) == (Caller("a", False), Caller("b", True), None)


def test_an_empty_secret_is_refused_and_not_replaced_by_a_drawn_one(make_engine: Any) -> None:
    with pytest.raises(ConfigError, match="0 bytes"):
        build_app(make_engine(), ServerConfig(), model_name="m", max_num_seqs=1, secret=b"")


def test_sharing_names_tenants_that_exist(make_engine: Any) -> None:
    config = ServerConfig(share_cache=(frozenset({"a", "nobody"}),))
    keys = ApiKeys([("k", Caller("a", False))])
    for api_keys in (None, keys):
        with pytest.raises(ConfigError):
            build_app(make_engine(), config, model_name="m", max_num_seqs=1, api_keys=api_keys)
    with pytest.raises(ConfigError):
        ServerConfig(share_cache=(frozenset({"a", "b"}), frozenset({"b", "c"})))


# -- time --------------------------------------------------------------------------------------------------------------

LONG = 1025


def two_that_miss(live: Live, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two requests under a salt of nobody else: what another salt has cached, and what nobody has seen."""
    known = ids(5000 + number, LONG)
    assert live.hit(known, cache_salt="other") in (0, LONG - 1)
    assert live.hit(known, cache_salt="other") == LONG - 1  # GUARD: it is there
    body = {"max_tokens": 1, "temperature": 0, "cache_salt": f"mine-{number}"}
    return {**body, "prompt": known}, {**body, "prompt": ids(7000 + number, LONG)}


def test_what_another_salt_has_cached_costs_exactly_the_work_of_what_nobody_has_seen(live: Live) -> None:
    live.reset()
    work = []
    for body in two_that_miss(live, 0):
        before = live.engine.stats().counters
        assert cached(live.post("/v1/completions", **body)) == 0
        work.append(live.engine.stats().counters.delta(before))
    assert work[0].num_computed_prompt_tokens == LONG
    assert work[0] == work[1]


@pytest.mark.timing
def test_what_another_salt_has_cached_takes_the_time_of_what_nobody_has_seen(live: Live) -> None:
    """A hit would take a small part of the time. Noise widens the medians of few pairs, more pairs narrow them."""
    live.reset()
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(100):
        pair = list(zip(two_that_miss(live, number), seconds, strict=True))
        for body, spent in pair if number % 2 else reversed(pair):
            begin = time.perf_counter()
            assert cached(live.post("/v1/completions", **body)) == 0
            spent.append(time.perf_counter() - begin)
        known, unseen = map(statistics.median, seconds)
        if number >= 10 and abs(known / unseen - 1) < 0.05:
            return
    raise AssertionError(f"{known:.4f} s for what another salt has cached, {unseen:.4f} s for what nobody has seen")
