"""A log of OpenAI-style requests becomes a trace: equal beginnings have equal ids, and no text is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from anaphora.errors import TraceError
from anaphora.sim import Trace, replay_sequential
from anaphora.sim.reading import read_trace

TEMPLATE = "".join(
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    ]
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(tmp_path: Path, tokenizer: Any, *entries: object, skip_bad: bool = False, block_size: int = 4) -> Trace:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return read_trace(path, skip_bad=skip_bad, load_tokenizer=lambda: tokenizer, log_block_size=block_size)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_prompt_is_its_tokens(tmp_path: Path, tokenizer: Any) -> None:
    first, second, third = read(
        tmp_path, tokenizer, {"prompt": "abcdefghij"}, {"prompt": "abcdefgh!!"}, {"prompt": list(b"abcd")}
    ).requests
    assert (first.input_length, first.hash_ids, first.output_length) == (10, (0, 1, 2), 1)
    assert second.hash_ids == (0, 1, 3)
    assert third.input_length == 4


def test_every_prompt_of_a_list_is_a_request(tmp_path: Path, tokenizer: Any) -> None:
    assert [r.input_length for r in read(tmp_path, tokenizer, {"prompt": ["abc", "de"]}).requests] == [3, 2]
    assert [r.input_length for r in read(tmp_path, tokenizer, {"prompt": [[1, 2], [3]]}).requests] == [2, 1]


@pytest.mark.parametrize("wrapped", [lambda body: body, lambda body: {"body": body}, lambda body: {"request": body}])
def test_messages_go_through_the_chat_template(tmp_path: Path, tokenizer: Any, wrapped: Any) -> None:
    (request,) = read(tmp_path, tokenizer, wrapped({"model": "m", "messages": user("hi")})).requests
    assert request.input_length == len("<user>hi<assistant>")


def test_a_batch_line(tmp_path: Path, tokenizer: Any) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": user("hello")}}
    assert len(read(tmp_path, tokenizer, line, line).requests) == 2


def test_the_next_turn_hits_what_was_answered(tmp_path: Path, tokenizer: Any) -> None:
    """A prompt of 30 tokens and 16 of output, of which 15 are computed: 11 blocks of 4 are found by the next turn."""
    first = user("x" * 13)
    answer = "the answer is 42"
    later = [*first, {"role": "assistant", "content": answer}, *user("and?")]
    trace = read(tmp_path, tokenizer, {"messages": first, "response": answer}, {"messages": later})
    assert trace.requests[0].input_length == 30
    assert trace.requests[0].output_length == 16
    hits: list[int] = []
    replay_sequential(trace, 100, 4, with_outputs=True, hits=hits)
    assert hits == [0, 44]


def chat_response(text: str | None, **usage: int) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


@pytest.mark.parametrize(
    ("extra", "length", "num_ids"),
    [
        ({}, 1, 0),
        ({"response": "12345678"}, 8, 1),
        ({"response": {"body": chat_response("12345678")}}, 8, 1),
        ({"response": chat_response("12345678", completion_tokens=9)}, 9, 2),  # and an end token
        ({"response": chat_response("12345678", completion_tokens=50)}, 50, 0),  # reasoning that the log does not show
        ({"response": chat_response(None, completion_tokens=50)}, 50, 0),  # a tool call
        ({"response": {"choices": [{"text": "12345678"}]}}, 8, 1),
        ({"usage": {"completion_tokens": 7}}, 7, 0),
    ],
)
def test_what_was_answered(tmp_path: Path, tokenizer: Any, extra: dict[str, Any], length: int, num_ids: int) -> None:
    (request,) = read(tmp_path, tokenizer, {"prompt": "abcd", **extra}).requests
    assert (request.output_length, len(request.output_hash_ids)) == (length, num_ids)


def test_every_choice_is_a_request(tmp_path: Path, tokenizer: Any) -> None:
    response = {"choices": [{"text": "12"}, {"text": "345"}], "usage": {"completion_tokens": 5}}
    requests = read(tmp_path, tokenizer, {"prompt": "abcd", "response": response}).requests
    assert [(request.hash_ids, request.output_length) for request in requests] == [((0,), 2), ((0,), 3)]


def test_salts_share_nothing(tmp_path: Path, tokenizer: Any) -> None:
    lines = [{"prompt": "abcdef", "cache_salt": salt} for salt in ("a", "b", "a")] + [{"prompt": "abcdef"}]
    one, two, three, none = (set(request.hash_ids) for request in read(tmp_path, tokenizer, *lines).requests)
    assert one == three
    assert len(one | two | none) == 6


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([{"timestamp": 1_700_000_000.5}, {"timestamp": 1_700_000_002}], [0.0, 1500.0]),
        ([{"created": 1_700_000_000_000}, {"created": 1_700_000_000_250}], [0.0, 250.0]),
        ([{"timestamp": "2026-01-01T00:00:00Z"}, {"timestamp": "2026-01-01T01:00:01+01:00"}], [0.0, 1000.0]),
        ([{"response": {"created": 5}}, {"response": {"created": 6}}], [0.0, 1000.0]),
        ([{}, {}], [0.0, 0.0]),
    ],
)
def test_times(tmp_path: Path, tokenizer: Any, times: list[dict[str, Any]], expected: list[float]) -> None:
    trace = read(tmp_path, tokenizer, *[{"prompt": "a", **time} for time in times])
    assert [request.timestamp_ms for request in trace.requests] == expected


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"timestamp": 4}, "time goes back by 1,000 ms"),
        ({"timestamp": None}, "it has no timestamp, unlike the lines before it"),
        ({"timestamp": "yesterday"}, "timestamp must be a number or ISO 8601"),
        ({"timestamp": True}, "timestamp must be a number of seconds"),
        ({"timestamp": float("nan")}, "timestamp must be a number of seconds"),
        ({"prompt": ""}, "a prompt has 0 tokens"),
        ({"prompt": [2**32]}, "not in"),
        ({"prompt": [1, "a"]}, "no `messages`, and no `prompt`"),
        ({"prompt": [True]}, "no `messages`, and no `prompt`"),
        ({"prompt": None}, "no `messages`, and no `prompt`"),
        ({"messages": "hi"}, "must be a non-empty list of messages"),
        ({"messages": [{"content": "hi"}]}, "message 0 must be a dict with 'role'"),
        ({"cache_salt": 3}, "cache_salt must be"),
        ({"response": chat_response("a", completion_tokens=-1)}, "completion_tokens must be an integer >= 0"),
    ],
    ids=str,
)
def test_broken_lines(tmp_path: Path, tokenizer: Any, broken: dict[str, Any], reason: str) -> None:
    lines = [{"prompt": "a", "timestamp": 5}, {"prompt": "a", "timestamp": 5} | broken, {"prompt": "b", "timestamp": 6}]
    with pytest.raises(TraceError, match=f"line 2: .*{reason}"):
        read(tmp_path, tokenizer, *lines)
    trace = read(tmp_path, tokenizer, *lines, skip_bad=True)
    assert (trace.num_skipped, len(trace.requests)) == (1, 2)
