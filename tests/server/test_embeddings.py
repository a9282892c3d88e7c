"""`/v1/embeddings`: HA3 step 6 and HA6 over HTTP, shapes, limits, refusals, and every way out."""

from __future__ import annotations

import base64
import json
import math
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from server_world import BOS, Live, cached, serving
from tiny_llama import ids

from anaphora.engine.engine import Engine
from anaphora.server.config import ServerConfig
from anaphora.server.embeddings import row_text
from anaphora.server.tenants import ApiKeys, Caller

P = ids(2300, 70)
Q = P[:48] + ids(2301, 22)
BOUND = 0.999999


def cosine(a: list[float], b: list[float]) -> float:
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))


def embed(live: Live, given: Any, status: int = 200, **body: Any) -> Any:
    return live.post("/v1/embeddings", status, input=given, **body)


def vector(reply: dict[str, Any]) -> Any:
    (entry,) = reply["data"]
    return entry["embedding"]


@pytest.mark.parametrize("pooling", [None, "mean", "token"])
def test_a_cached_prompt_has_the_embedding_of_a_cold_one(live: Live, pooling: str | None) -> None:
    cold = []
    for prompt in (P, Q):
        live.reset()
        cold.append(vector(embed(live, prompt, pooling=pooling)))
    live.reset()
    hits = [0, 64, 64, 48, 64] if pooling is None else [0] * 5
    for prompt, reference, hit in zip((P, P, P, Q, P), (cold[0], *cold[:1] * 2, cold[1], cold[0]), hits, strict=True):
        before = live.metrics()
        reply = embed(live, prompt, pooling=pooling)
        after = live.metrics()
        assert reply["usage"] == {
            "prompt_tokens": 70,
            "total_tokens": 70,
            "prompt_tokens_details": {"cached_tokens": hit},
        }
        got, right = (vector(reply), reference) if pooling == "token" else ([vector(reply)], [reference])
        assert len(got) == (70 if pooling == "token" else 1)
        assert all(cosine(a, b) > BOUND for a, b in zip(got, right, strict=True))
        assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == hit
        queried = after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"]
        assert queried == (70 if pooling is None else 0)
        assert after["prompt_tokens_computed_total"] - before["prompt_tokens_computed_total"] == 70 - hit
    assert live.hit(P) == 64  # a completion finds what an embedding has computed
    live.reset()
    live.hit(P)
    assert cached(embed(live, P)) == (64)  # and the other way round
    assert live.live_blocks() == 0


def test_every_kind_of_input_gives_its_vectors_in_order(live: Live) -> None:
    text = "the tide table"
    token_ids = live.post("/tokenize", prompt=text)["tokens"]
    one = vector(embed(live, text))
    for given in ([text], token_ids, [token_ids]):
        assert vector(embed(live, given)) == pytest.approx(one, abs=1e-6)
    reply = embed(live, [P, text, Q])
    assert [(entry["object"], entry["index"]) for entry in reply["data"]] == [("embedding", i) for i in range(3)]
    for entry, prompt in zip(reply["data"], (P, text, Q), strict=True):
        assert cosine(entry["embedding"], vector(embed(live, prompt))) > BOUND
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    assert reply["usage"]["prompt_tokens"] == 140 + len(token_ids)


def test_base64_holds_the_same_numbers_as_float(live: Live) -> None:
    numbers = vector(embed(live, P))
    encoded = vector(embed(live, P, encoding_format="base64"))
    assert list(struct.unpack("<64f", base64.b64decode(encoded))) == pytest.approx(numbers, rel=1e-7)
    rows = vector(embed(live, P, encoding_format="base64", pooling="token"))
    assert len(rows) == 70
    assert {len(base64.b64decode(row)) for row in rows} == {256}


def test_nine_digits_tell_every_float32_apart() -> None:
    numbers = [struct.unpack("<f", struct.pack("<I", bits))[0] for bits in range(1, 0x7F800000, 7_777_777)]
    numbers += [-number for number in numbers] + [1.0, 0.1, 1 / 3]
    read = json.loads(row_text(numbers))
    assert [struct.pack("<f", number) for number in read] == [struct.pack("<f", number) for number in numbers]


def test_rows_have_length_one_unless_not_wanted(live: Live) -> None:
    scaled, raw = vector(embed(live, P)), vector(embed(live, P, normalize=False))
    assert math.sqrt(math.fsum(x * x for x in scaled)) == pytest.approx(1.0, abs=1e-6)
    assert math.sqrt(math.fsum(x * x for x in raw)) > 2
    assert cosine(scaled, raw) > BOUND


def test_a_bos_is_added_once_or_not_at_all(live: Live) -> None:
    assert embed(live, "abc")["usage"]["prompt_tokens"] == 4
    assert embed(live, BOS + "abc")["usage"]["prompt_tokens"] == 4
    assert embed(live, "abc", add_special_tokens=False)["usage"]["prompt_tokens"] == 3


def test_the_openai_client_takes_it(live: Live) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
    live.reset()
    reply = client.embeddings.create(model="tiny", input=["the tide table", "the tide table"])  # asks for base64
    first, second = (entry.embedding for entry in reply.data)
    assert len(first) == 64
    assert cosine(first, second) > BOUND
    assert reply.usage.prompt_tokens == 30
    floats = client.embeddings.create(model="tiny", input="the tide table", encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(first, abs=1e-6)
    assert floats.usage.model_extra == {"prompt_tokens_details": {"cached_tokens": 0}}
    client.embeddings.create(model="tiny", input=P, extra_body={"cache_salt": "a"})
    salted = client.embeddings.create(model="tiny", input=P, extra_body={"cache_salt": "a"})
    assert salted.usage.model_extra["prompt_tokens_details"] == {"cached_tokens": 64}


def test_salts_isolate(live: Live) -> None:
    live.reset()
    hits = [cached(embed(live, P, cache_salt=salt)) for salt in ("a", "a", "b", "b", None, None, "a")]
    assert hits == [0, 64, 0, 64, 0, 64, 64]


def test_tenants_isolate(make_engine: Callable[..., Engine]) -> None:
    keys = ApiKeys([("ka", Caller("anna", False)), ("kb", Caller("berta", False))])
    with serving(make_engine(), api_keys=keys) as live:
        assert embed(live, P, 401)["error"]["code"] == "invalid_api_key"
        hits = [
            cached(embed(live, P, headers={"authorization": f"Bearer {key}"})) for key in ("ka", "ka", "kb", "kb", "ka")
        ]
    assert hits == [0, 64, 0, 64, 64]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [[]]}, "input", "invalid_value"),
        ({"input": [P, 7]}, "input", "invalid_value"),
        ({"input": [384]}, "input", "invalid_value"),
        ({"input": [[8], [8.5]]}, "input", "invalid_value"),
        ({"input": [8] * 5000}, "input", "context_length_exceeded"),
        ({"input": [[8]] * 257}, "input", "invalid_value"),
        ({"input": [8] * 2049, "pooling": "token"}, "input", "invalid_value"),
        ({"input": P, "dimensions": 32}, "dimensions", "unsupported_parameter"),
        ({"input": P, "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": P, "pooling": "cls"}, "pooling", "invalid_value"),
        ({"input": P, "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": P, "cache_salt": ""}, "cache_salt", "invalid_value"),
        ({"input": P, "max_tokens": 5}, "max_tokens", "unknown_parameter"),
        ({"input": P, "model": "other"}, "model", "model_not_found"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(live: Live, body: dict[str, Any], param: str, code: str) -> None:
    error = live.post("/v1/embeddings", 404 if code == "model_not_found" else 400, **body)["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert live.live_blocks() == 0


def test_the_whole_size_is_no_cut(live: Live) -> None:
    assert vector(embed(live, P, dimensions=64)) == pytest.approx(vector(embed(live, P)), abs=1e-6)


@pytest.fixture
def small(make_engine: Callable[..., Engine]) -> Iterator[Live]:
    config = ServerConfig(request_timeout_s=0.5, max_queue=1)
    with serving(make_engine(max_num_batched_tokens=16), config, max_num_seqs=1) as live:
        yield live


@pytest.mark.timing
def test_a_client_that_goes_away_a_deadline_and_a_full_house_leave_nothing(small: Live) -> None:
    slow = small.engine._executor.execute

    def execute(plan: Any) -> Any:
        time.sleep(0.05)
        return slow(plan)

    small.engine._executor.execute = execute  # type: ignore[method-assign]
    assert embed(small, [P, P, P], 400)["error"]["param"] == "input"  # more than the house ever takes
    long = ids(2302, 1000)
    assert embed(small, long, 504)["error"]["code"] == "request_timeout"
    with pytest.raises(Exception, match="timed out"):
        small.client.post("/v1/embeddings", json={"input": long}, timeout=0.2)
    until = time.monotonic() + 2
    while small.live_blocks() and time.monotonic() < until:
        time.sleep(0.02)
    assert small.live_blocks() == 0
    assert cached(embed(small, P)) == 0
    assert cached(embed(small, P)) == 64
    outcomes = {name: count for name, count in small.metrics().items() if name.startswith("http_requests_total")}
    assert outcomes['http_requests_total{endpoint="embeddings",outcome="disconnect"}'] == 1
    assert outcomes['http_requests_total{endpoint="embeddings",outcome="timeout"}'] == 1
    assert outcomes['http_requests_total{endpoint="embeddings",outcome="finished"}'] == 2
