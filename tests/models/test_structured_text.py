"""The built-in models write what a schema says, through their own tokenizers."""

from __future__ import annotations

import json

import pytest

from anaphora import LLM, SamplingParams

pytestmark = pytest.mark.models

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "since": {"type": "integer", "minimum": 1, "maximum": 2100}},
    "required": ["city", "since"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_built_in_model_follows_a_schema_and_an_expression(name: str) -> None:
    llm = LLM(name, num_blocks=64, max_model_len=512)
    greedy = {"temperature": 0.0, "max_tokens": 48}
    prompt = "The capital of France as JSON: "
    by_schema, by_regex = llm.generate(
        [prompt, "Paris was founded in the year "],
        [SamplingParams(json_schema=SCHEMA, **greedy), SamplingParams(regex="[0-9]{1,4} (BC|AD)", **greedy)],
    )
    value = json.loads(by_schema.outputs[0].text)
    assert value["city"] == "Paris"
    assert 1 <= value["since"] <= 2100
    assert by_schema.outputs[0].finish_reason == by_regex.outputs[0].finish_reason == "stop"
    assert by_regex.outputs[0].text.split()[1] in ("BC", "AD")
