"""/v1/responses: the same model, other words."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_world import PATIENCE_S, Live, serving

INPUT = "When is high tide? " * 6


def respond(live: Live, status: int = 200, **body: Any) -> Any:
    values = {"input": INPUT, "max_output_tokens": 6, "temperature": 0}
    return live.post("/v1/responses", status, **(values | body))


def text_of(reply: Any) -> str:
    return reply["output"][0]["content"][0]["text"]


def test_a_response_is_what_the_chat_gives(live: Live) -> None:
    live.reset()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": INPUT}]
    chat = live.post("/v1/chat/completions", messages=messages, max_tokens=6, temperature=0)
    reply = respond(live, instructions="Be brief.", return_timings=True)
    assert text_of(reply) == chat["choices"][0]["message"]["content"]
    length = chat["usage"]["prompt_tokens"]
    assert reply["usage"] == {
        "input_tokens": length,
        "input_tokens_details": {"cached_tokens": 16 * ((length - 1) // 16)},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": length + 6,
    }
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["timings"]["ttft_ms"] > 0
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": INPUT}]}]
    assert text_of(respond(live, instructions="Be brief.", input=parts)) == text_of(reply)


def test_a_streamed_response_has_every_event_in_order(live: Live) -> None:
    whole = respond(live)
    body = {"input": INPUT, "max_output_tokens": 6, "temperature": 0, "stream": True}
    with live.client.stream("POST", "/v1/responses", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    around = [name for name in names if name != "response.output_text.delta"]
    assert around == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(whole) == text_of(events[-1]["response"])
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_salts_isolate_responses(live: Live) -> None:
    live.reset()
    hits = [
        respond(live, cache_salt=salt)["usage"]["input_tokens_details"]["cached_tokens"]
        for salt in ("a", "a", "b", None, "a")
    ]
    assert (hits[0], hits[2], hits[3]) == (0, 0, 0)
    assert hits[1] == hits[4] > 100


def test_the_openai_client(live: Live) -> None:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        body: Any = {"model": "tiny", "input": INPUT, "max_output_tokens": 6, "temperature": 0}
        whole = client.responses.create(**body)
        assert whole.usage is not None
        *_, last = client.responses.create(**body, stream=True)
        assert last.type == "response.incomplete"
        assert last.response.output_text == whole.output_text != ""


def test_the_openai_clients_stream_ends_with_the_whole_response(live: Live) -> None:
    ids = respond(live, return_token_ids=True)["token_ids"]
    last = next(token for token in ids[1:] if token not in ids[: ids.index(token)])
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        body: Any = {"model": "tiny", "input": INPUT, "temperature": 0, "extra_body": {"stop_token_ids": [last]}}
        with client.responses.stream(**body) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            response = stream.get_final_response()
    assert (response.status, response.output_text) == ("completed", "".join(deltas))
    assert response.usage is not None
    assert response.usage.output_tokens == ids.index(last) + 1


def test_a_stream_that_fails_says_so_and_ends_with_a_failed_response(make_engine: Any) -> None:
    engine = make_engine()
    with serving(engine) as live:
        execute, steps = engine._executor.execute, iter(range(9))

        def fail(plan: Any) -> Any:
            if next(steps) == 2:
                raise RuntimeError("no more")
            return execute(plan)

        engine._executor.execute = fail
        events = stream_of(live, input=INPUT, max_output_tokens=6, temperature=0)
        *_, error, failed = events
        assert (error["type"], error["code"]) == ("error", "generation_failed")
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"]["code"] == "server_error"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert live.live_blocks() == 0


def stream_of(live: Live, **body: Any) -> list[dict[str, Any]]:
    with live.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
        return [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {"input": None}),
        ("input", {"input": []}),
        ("input[0]", {"input": [{"type": "function_call_output", "output": "x"}]}),
        ("input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("reasoning", {"reasoning": {"effort": "low"}}),
        ("truncation", {"truncation": "auto"}),
        ("text", {"text": {"verbosity": "low"}}),
        ("text", {"text": {"format": {"type": "json_object"}}}),
        ("cache_salt", {"cache_salt": ""}),
        ("n", {"n": 2}),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_field(live: Live, param: str, body: dict[str, Any]) -> None:
    assert respond(live, 400, **body)["error"]["param"] == param
