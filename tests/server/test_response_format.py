"""response_format: what comes back is what was asked for, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_world import CHAT_TEMPLATE, PATIENCE_S, Live, chunks, serving
from tiny_tokenizer import make_tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "Describe a pet."}]


@pytest.fixture(scope="module")
def ending(make_engine: Any) -> Iterator[Live]:
    """A server whose model has an end token."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    with serving(make_engine(tokenizer=tokenizer)) as live:
        yield live


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["kind", "age"]
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["age"] <= 99


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_shapes_chats_and_completions(ending: Live, seed: int) -> None:
    body = {"seed": seed, "max_tokens": 60, "response_format": BY_SCHEMA}
    chat = ending.post("/v1/chat/completions", messages=MESSAGES, n=2, **body)
    for choice in chat["choices"]:
        assert choice["finish_reason"] == "stop"
        check(choice["message"]["content"])
    check(ending.post("/v1/completions", prompt="A pet: ", **body)["choices"][0]["text"])
    events = chunks(ending, prompt="A pet: ", **body)
    check("".join(event["choices"][0]["text"] for event in events))


def test_a_regular_expression_shapes_the_output(ending: Live) -> None:
    wanted = {"type": "regex", "regex": "[a-z]{3}-[0-9]{2}"}
    reply = ending.post("/v1/completions", prompt="Code: ", seed=1, response_format=wanted)
    assert re.fullmatch(wanted["regex"], reply["choices"][0]["text"])


def test_a_schema_that_cannot_be_followed_is_refused_with_the_field(ending: Live) -> None:
    for schema in ({"type": "nonsense"}, {"$ref": "#/nowhere"}, {"a": {"b": 1}, "type": 7}):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        error = ending.post("/v1/completions", 400, prompt="x", response_format=wanted)["error"]
        assert error["param"] == "response_format"
    deep: Any = {"type": "object"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    assert (
        ending.post("/v1/completions", 400, prompt="x", response_format=wanted)["error"]["param"] == "response_format"
    )


def test_the_openai_client_gets_its_schema(ending: Live) -> None:
    with openai.OpenAI(base_url=ending.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        wanted: Any = BY_SCHEMA
        reply = client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=4, max_tokens=60, response_format=wanted
        )
    check(reply.choices[0].message.content or "")
