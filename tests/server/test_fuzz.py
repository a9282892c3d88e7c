"""Whatever a body holds: an answer, never a 5xx, and nothing left in the engine.

Right bodies with some fields of any kind: also what no schema can say (NaN, 1e999, numbers of any size, deep nesting).
test_openapi.py makes bodies by the schema.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_world import Live

from anaphora.server.admin import ResetFields
from anaphora.server.errors import ApiError
from anaphora.server.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    EmbeddingFields,
    LoadAdapterFields,
    ResponsesFields,
    TokenizeFields,
    UnloadAdapterFields,
    parse_fields,
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 400),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, 1e-320]),
    st.floats(),
    st.sampled_from(["", "a", "\x00", "user", "text", "auto", "tiny", "<s>", "é", "0", "-1"]),
    st.text(max_size=5),
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "schema", "8"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
MESSAGES = [{"role": "user", "content": "hi"}]
ENDPOINTS: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/completions": (CompletionFields, {"prompt": [8, 9], "max_tokens": 2}),
    "/v1/chat/completions": (ChatFields, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/responses": (ResponsesFields, {"input": "hi", "max_output_tokens": 2}),
    "/v1/embeddings": (EmbeddingFields, {"input": [8, 9]}),
    "/tokenize": (TokenizeFields, {"prompt": "hi"}),
    "/detokenize": (DetokenizeFields, {"tokens": [8]}),
    "/v1/load_lora_adapter": (LoadAdapterFields, {"lora_name": "a", "lora_path": "a"}),
    "/v1/unload_lora_adapter": (UnloadAdapterFields, {"lora_name": "a"}),
    "/reset_prefix_cache": (ResetFields, {}),
}


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_makes_a_5xx(live: Live, path: str, data: st.DataObject) -> None:
    kind, valid = ENDPOINTS[path]
    fields = st.sampled_from([*kind.model_fields, "unknown"])  # type: ignore[attr-defined]
    body = valid | data.draw(st.dictionaries(fields, VALUES, max_size=3))
    if body.get("max_tokens") is None and path == "/v1/chat/completions":
        body["max_tokens"] = 2  # without it a chat goes on to the context limit
    if body.get("max_output_tokens") is None and path == "/v1/responses":
        body["max_output_tokens"] = 2
    reply = live.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code < 500, (body, reply.text)
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    elif "error" in reply.text:
        assert '"error":{' not in reply.text.replace(" ", ""), (body, reply.text)


@pytest.mark.parametrize("name", ["top_k", "priority", "max_tokens", "seed", "n", "min_tokens"])
@pytest.mark.parametrize("value", [2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)])
def test_a_number_of_any_size_costs_nobody_else_anything(live: Live, name: str, value: int) -> None:
    body = {"prompt": [8, 9], "stop_token_ids": list(range(384)), name: value}
    reply = live.client.post("/v1/completions", json=body)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["param"] == name


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["metadata", "text"])
def test_a_number_that_json_has_not_is_not_echoed(live: Live, field: str, number: str) -> None:
    value = f'{{"format": {{"type": "text", "schema": {{"x": {number}}}}}}}'
    body = f'{{"input": "hi", "max_output_tokens": 2, "{field}": {value}}}'
    reply = live.client.post("/v1/responses", content=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("body", ["[" * 100_000, '{"model":' * 5000, '{"model":' * 5000 + "1" + "}" * 5000])
def test_a_body_of_any_depth_is_refused(live: Live, path: str, body: str) -> None:
    reply = live.client.post(path, content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "stop_token_ids", [5] * 1025),
        ("/v1/chat/completions", "chat_template_kwargs", {f"k{number}": 1 for number in range(65)}),
        ("/v1/responses", "metadata", {f"k{number}": "v" for number in range(17)}),
        ("/v1/responses", "metadata", {"k": "v" * 513}),
        ("/v1/responses", "text", {"format": {"type": "text", "more": [1]}}),
    ],
)
def test_what_would_keep_the_event_loop_busy_is_bounded(live: Live, path: str, field: str, value: Any) -> None:
    error = live.post(path, 400, **{**ENDPOINTS[path][1], field: value})["error"]
    assert error["param"] == field


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": [' + "8," * 2_000_000 + "8]}", "prompt"),  # as many as may be: refused by the model's limit
        ('{"prompt": [' + "8," * 2_000_001 + "8]}", "body"),
        ('{"prompt": ' + "[" * 100_000 + "{" * 100_001, "body"),
        ('{"prompt": "' + ":" * 199_999 + '", "unknown": 1}', "body"),
        ('{"prompt": "' + ":" * 199_998 + '", "unknown": 1}', "unknown"),
        ('{"prompt": [8], "stream_options": {"a": 1, "b": 2}}', "stream_options.a"),
    ],
    ids=["values", "too many values", "containers", "members", "unknown", "unknown inside"],
)
def test_what_a_body_holds_is_bounded_and_what_is_unknown_is_named(live: Live, body: str, param: str) -> None:
    reply = live.client.post("/v1/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_unknown_fields_cost_little_more_than_any_others() -> None:
    """pydantic's own refusal would collect an error for each: seconds in which no other thread runs."""
    members = ",".join(f'"k{number}": 1' for number in range(100_000)).encode()

    def seconds(body: bytes) -> float:
        begin = time.thread_time()
        with contextlib.suppress(ApiError):
            parse_fields(CompletionFields, body)
        return time.thread_time() - begin

    unknown, known = (
        min(seconds(body) for _ in range(3)) for body in (b"{%s}" % members, b'{"logit_bias": {%s}}' % members)
    )
    assert unknown <= 4 * known


def test_after_all_that_nothing_is_left(live: Live) -> None:
    assert live.live_blocks() == 0
    assert live.engine.num_unfinished == 0
    assert len(live.generate([8, 9], 3)["choices"][0]["token_ids"]) == 3
