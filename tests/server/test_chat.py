"""/v1/chat/completions and /tokenize: what becomes of a conversation, and how much of it hits."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from server_world import Live, cached, chunks, make_tokenizer, serving

from anaphora.api.build import build_engine
from anaphora.config import EngineConfig

SYSTEM = "You are a harbour master. " * 24
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Find the {name}",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "when": {"type": "string"}}},
        },
    }
    for name in ("tide", "wind")
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"where": "A", "n": 1}'}}
    ],
}


def conversation() -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "When is high tide?"},
            copy.deepcopy(CALL),
            {"role": "tool", "tool_call_id": "c1", "content": "at noon"},
            {"role": "assistant", "content": "At noon.", "reasoning_content": "The tool says so."},
            {"role": "user", "content": "And low tide? Be brief."},
        ],
        "tools": copy.deepcopy(TOOLS),
    }


def changed(change: Any) -> dict[str, Any]:
    chat = conversation()
    change(chat)
    return chat


def ask(live: Live, max_tokens: int = 1, **chat: Any) -> Any:
    return live.post("/v1/chat/completions", max_tokens=max_tokens, temperature=0, return_token_ids=True, **chat)


def test_a_chat_reply_has_openais_shape_and_is_the_completion_of_the_rendered_ids(live: Live) -> None:
    rendered = live.post("/tokenize", **conversation())
    reply = ask(live, 5, **conversation())
    assert reply["object"] == "chat.completion"
    assert reply["prompt_token_ids"] == rendered["tokens"]
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["role"], choice["logprobs"]) == ("assistant", None)
    by_ids = live.generate(rendered["tokens"], 5)["choices"][0]
    assert (by_ids["text"], by_ids["token_ids"]) == (choice["message"]["content"], choice["token_ids"])
    assert reply["usage"]["prompt_tokens"] == rendered["count"]


def test_a_streamed_chat_says_the_same_as_the_whole(live: Live) -> None:
    chat = conversation() | {"max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = live.post("/v1/chat/completions", **chat)
    *parts, last = chunks(live, "/v1/chat/completions", **chat, stream_options={"include_usage": True})
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    content = [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 9
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": {"cached_tokens": last_hit(whole)}}


def last_hit(reply: Any) -> int:
    return 16 * ((reply["usage"]["prompt_tokens"] - 1) // 16)


def test_without_max_tokens_a_chat_may_fill_the_context(make_engine: Any) -> None:

    with serving(make_engine(max_model_len=64)) as live:
        messages = [{"role": "user", "content": "hi"}]
        reply = live.post("/v1/chat/completions", messages=messages, temperature=0)
        assert reply["usage"]["total_tokens"] == 64
        assert reply["choices"][0]["finish_reason"] == "length"


def set_system(text: str) -> Any:
    return lambda chat: chat["messages"][0].update(content=text)


def set_last(text: str) -> Any:
    return lambda chat: chat["messages"][-1].update(content=text)


def add_turn(chat: Any) -> None:
    chat["messages"] += [{"role": "assistant", "content": "At six."}, {"role": "user", "content": "Thanks."}]


def permute_keys(chat: Any) -> None:
    parameters = chat["tools"][0]["function"]["parameters"]
    parameters["properties"] = dict(reversed(parameters["properties"].items()))


def respace_arguments(chat: Any) -> None:
    chat["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"where":"A","n":1}'


def reorder_arguments(chat: Any) -> None:
    chat["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"n": 1, "where": "A"}'


def as_parts(chat: Any) -> None:
    for message in chat["messages"]:
        if message["content"] is not None:
            message["content"] = [{"type": "text", "text": message["content"]}]


PAIRS = {
    "same twice": (conversation(), conversation()),
    "next turn": (conversation(), changed(add_turn)),
    "time first": (changed(set_system("10:01 " + SYSTEM)), changed(set_system("10:02 " + SYSTEM))),
    "time last": (changed(set_last("And low tide? 10:01")), changed(set_last("And low tide? 10:02"))),
    "date": (changed(set_system(SYSTEM + "2026-01-01")), changed(set_system(SYSTEM + "2026-01-02"))),
    "tools swapped": (conversation(), changed(lambda chat: chat["tools"].reverse())),
    "tool keys permuted": (conversation(), changed(permute_keys)),
    "arguments respaced": (conversation(), changed(respace_arguments)),
    "arguments reordered": (conversation(), changed(reorder_arguments)),
    "trailing space": (conversation(), changed(set_system(SYSTEM + " "))),
    "reasoning gone": (conversation(), changed(lambda chat: chat["messages"][4].pop("reasoning_content"))),
    "parts": (conversation(), changed(as_parts)),
    "no generation prompt": (conversation(), conversation() | {"add_generation_prompt": False}),
    "system empty": (
        changed(lambda chat: chat["messages"].pop(0)),
        changed(set_system("")),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_hit_is_the_common_beginning_of_the_rendered_ids(live: Live, name: str) -> None:
    first, second = PAIRS[name]
    x, y = (live.post("/tokenize", **chat)["tokens"] for chat in (first, second))
    common = next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
    live.reset()
    assert cached(ask(live, **first)) == 0
    reply = ask(live, 4, **second)
    assert cached(reply) == 16 * (min(common, len(y) - 1) // 16)
    live.reset()
    assert ask(live, 4, **second)["choices"] == reply["choices"]
    if name in ("same twice", "next turn", "arguments respaced", "parts"):
        assert cached(reply) > 16 * (len(SYSTEM) // 16)


def test_the_time_of_day_costs_the_whole_system_text_only_if_it_stands_first(live: Live) -> None:
    hits = []
    for name in ("time first", "time last"):
        first, second = PAIRS[name]
        live.reset()
        ask(live, **first)
        hits.append(cached(ask(live, **second)))
    assert hits[1] - hits[0] > 400


def test_a_completion_of_the_rendered_text_has_the_same_ids_with_one_bos(live: Live) -> None:
    rendered = live.post("/tokenize", **conversation())
    assert rendered["tokens"].count(256) == 1
    by_text = live.generate(rendered["prompt"], 1)["choices"][0]["prompt_token_ids"]
    assert by_text == rendered["tokens"]
    assert live.post("/tokenize", prompt=rendered["prompt"])["tokens"] == rendered["tokens"]


def test_tokenize_and_detokenize_are_inverse(live: Live) -> None:
    reply = live.post("/tokenize", prompt="tide", return_token_strs=True)
    assert (reply["count"], reply["token_strs"]) == (5, ["<s>", "t", "i", "d", "e"])
    assert live.post("/detokenize", tokens=reply["tokens"]) == {"prompt": "<s>tide"}
    assert live.post("/tokenize", prompt="tide", add_special_tokens=False)["tokens"] == reply["tokens"][1:]


def refused(live: Live, path: str, param: str, **body: Any) -> str:
    error = live.post(path, 400, **body)["error"]
    assert error["param"] == param, error
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


MESSAGES = [{"role": "user", "content": "hi"}]
TEXT_AND_IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url"}]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages", {"messages": ["hi"]}),
        ("messages[0].role", {"messages": [{"content": "hi"}]}),
        ("messages[1].content", {"messages": [*MESSAGES, {"role": "user"}]}),
        ("messages[0].content[1]", {"messages": [{"role": "user", "content": TEXT_AND_IMAGE}]}),
        ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
        ("tool_choice", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}),
        ("tool_choice", {"messages": MESSAGES, "tool_choice": "auto"}),
        ("top_logprobs", {"messages": MESSAGES, "top_logprobs": 2}),
        ("top_logprobs", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}),
        ("max_tokens", {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}),
        ("max_tokens", {"messages": MESSAGES, "max_tokens": 0}),
        ("chat_template_kwargs", {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("chat_template", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}),
        ("prompt", {"messages": MESSAGES, "prompt": "x"}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 5000}]}),
    ],
)  # fmt: skip
def test_a_wrong_chat_is_refused_with_the_field(live: Live, param: str, body: dict[str, Any]) -> None:
    refused(live, "/v1/chat/completions", param, **body)


def test_tools_are_refused_where_the_template_reads_none(make_engine: Any) -> None:

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with serving(make_engine(tokenizer=tokenizer)) as live:
        assert "template" in refused(live, "/v1/chat/completions", "tools", messages=MESSAGES, tools=TOOLS)


def test_a_model_without_a_tokenizer_takes_ids_alone(tiny: Any) -> None:

    with serving(build_engine(EngineConfig(model=tiny, num_blocks=16))) as live:
        assert len(live.generate([8, 9, 10], 3)["choices"][0]["token_ids"]) == 3
        refused(live, "/v1/completions", "prompt", prompt="text")
        refused(live, "/v1/chat/completions", "messages", messages=MESSAGES)
        refused(live, "/v1/completions", "stop", prompt=[8], stop="x")
        assert json.dumps(live.generate([8], 2, logprobs=1)["choices"][0]["logprobs"]).count("token_id:") >= 2
