"""What is refused, and that every refusal has OpenAI's shape and names the field."""

from __future__ import annotations

from typing import Any

import pytest
from server_world import Live, serving
from tiny_llama import ids

from anaphora.server.config import ServerConfig
from anaphora.server.fields import CompletionFields

PROMPT = [8, 9, 10]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("frobnicate", {"frobnicate": 1}),
        ("use_beam_search", {"use_beam_search": True}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": "text"}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}),
        ("response_format", {"response_format": {"type": "regex"}}),
        ("response_format", {"response_format": {"type": "json_object"}}),  # this model has no end token
        ("n", {"n": 2, "max_tokens": 0, "prompt_logprobs": 0}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("best_of", {"n": 3, "best_of": 2}),
        ("best_of", {"best_of": 17}),
        ("suffix", {"suffix": "the end"}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("min_tokens", {"min_tokens": 17}),
        ("min_tokens", {"min_tokens": -1}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options.foo", {"stream": True, "stream_options": {"foo": 1}}),
        ("stream_options.continuous_usage_stats", {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        ("n", {"n": 0}),
        ("n", {"n": 17}),
        ("n", {"n": "2"}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "0"}),
        ("top_p", {"top_p": 0}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": True}),
        ("seed", {"seed": -1}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": [1] * 100_000}),
        ("stop", {"stop": "x" * 1025}),
        ("stop_token_ids", {"stop_token_ids": [384]}),
        ("stop_token_ids", {"stop_token_ids": ["8"]}),
        ("logit_bias", {"logit_bias": {"384": 1}}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"7": 1, "007": 2}}),
        ("logit_bias", {"logit_bias": {str(i): 1 for i in range(1025)}}),
        ("logit_bias", {"logit_bias": [1]}),
        ("cache_salt", {"cache_salt": ""}),
        ("cache_salt", {"cache_salt": 7}),
        ("cache_salt", {"cache_salt": []}),
        ("cache_salt", {"cache_salt": ["a"]}),
        ("cache_salt", {"cache_salt": {"start": 0, "salt": "a"}}),
        ("cache_salt", {"cache_salt": [{"start": 0}]}),
        ("cache_salt", {"cache_salt": [{"start": 0, "salt": "a", "end": 4}]}),
        ("cache_salt", {"cache_salt": [{"start": 0, "salt": ""}]}),
        ("cache_salt", {"cache_salt": [{"start": 0, "salt": 1}]}),
        ("cache_salt", {"cache_salt": [{"start": True, "salt": "a"}]}),
        ("cache_salt", {"cache_salt": [{"start": 1.0, "salt": "a"}]}),
        ("cache_salt", {"cache_salt": [{"start": -1, "salt": "a"}]}),
        ("cache_salt", {"cache_salt": [{"start": 4, "salt": "a"}, {"start": 4, "salt": "b"}]}),
        ("cache_salt", {"cache_salt": [{"start": 0, "salt": "a" * 1025}]}),
        ("cache_salt", {"cache_salt": [{"start": i, "salt": "a"} for i in range(33)]}),
        ("priority", {"priority": 1.5}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": {}}),
        ("prompt", {"prompt": [8, "x"]}),
        ("prompt", {"prompt": [384]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [True]}),
        ("prompt", {"prompt": ["a", 5]}),
        ("prompt", {"prompt": ids(1, 4096)}),
        ("prompt", {"prompt": [PROMPT] * 257}),
        ("prompt", {"prompt": "x" * 600_000}),
    ],
)
def test_a_wrong_completion_is_refused_with_the_field(live: Live, param: str, body: dict[str, Any]) -> None:
    error = live.post("/v1/completions", 400, **({"prompt": PROMPT} | body))["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert error["code"]
    assert len(error["message"]) < 1100
    assert live.live_blocks() == 0


def test_every_field_may_be_null_and_fields_without_effect_are_taken(live: Live) -> None:

    nothing = dict.fromkeys(CompletionFields.model_fields, None)
    plain = live.post("/v1/completions", prompt=PROMPT, temperature=0)
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    for extra in (nothing, harmless):
        body = {**extra, "prompt": PROMPT, "temperature": 0, "model": "tiny"}
        assert live.post("/v1/completions", **body)["choices"] == plain["choices"]


def test_broken_bodies_wrong_models_urls_and_methods(live: Live) -> None:
    for body in (b"", b"{", b"[1]", b'{"prompt": NaN}', b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}'):
        reply = live.client.post("/v1/completions", content=body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), body[:20]
    error = live.post("/v1/completions", 404, prompt=PROMPT, model="gpt-4")["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert live.client.get("/nowhere").json()["error"]["code"] == "unknown_url"
    wrong_method = live.client.get("/v1/completions")
    assert (wrong_method.status_code, wrong_method.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_body_over_the_limit_is_refused_before_it_is_read(make_engine: Any) -> None:
    with serving(make_engine(), ServerConfig(max_body_bytes=1000)) as live:
        error = live.post("/v1/completions", 413, prompt="x" * 1000)["error"]
        assert (error["param"], error["code"]) == ("body", "body_too_large")

        def endless() -> Any:  # chunked: no length is known beforehand
            for _ in range(100):
                yield b"x" * 100

        assert live.client.post("/v1/completions", content=endless()).status_code == 413
        assert len(live.generate(PROMPT, 3)["choices"][0]["token_ids"]) == 3


def test_a_prompt_that_can_never_fit_is_refused_whatever_is_cached(make_engine: Any) -> None:
    with serving(make_engine(num_blocks=32)) as live:
        warm = ids(1, 450)
        live.generate(warm, 1)
        for length, status in ((511, 200), (512, 200), (513, 400), (1000, 400)):
            prompt = warm + ids(2, length - 450)
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            assert live.client.post("/v1/completions", json=body).status_code == status
            live.reset()
            assert live.client.post("/v1/completions", json=body).status_code == status
            live.reset()
            live.generate(warm, 1)
        assert len(live.generate(ids(3, 20), 5)["choices"][0]["token_ids"]) == 5
        long = live.generate(ids(4, 400), 200)
        assert (long["choices"][0]["finish_reason"], long["usage"]["completion_tokens"]) == ("length", 113)


def test_more_outputs_than_the_server_ever_takes_are_refused_not_queued(make_engine: Any) -> None:
    with serving(make_engine(), ServerConfig(max_queue=1), max_num_seqs=1) as live:
        assert live.post("/v1/completions", 400, prompt=PROMPT, n=3)["error"]["param"] == "n"
        assert live.generate(PROMPT, 2, n=2)["usage"]["completion_tokens"] == 4
