"""Scoring a prompt over HTTP: prompt_logprobs, and echo with logprobs, cold and warm."""

from __future__ import annotations

from typing import Any

import pytest
from server_world import Live, cached, chunks, serving
from tiny_llama import ids

P = ids(2300, 70)


def close(got: list[Any], right: list[Any]) -> bool:
    return all(a is b is None or abs(a - b) < 1e-3 for a, b in zip(got, right, strict=True))


@pytest.mark.parametrize("k", [0, 1, 5])
def test_a_cached_prompt_is_scored_as_a_cold_one(live: Live, k: int) -> None:
    live.reset()
    cold = live.generate(P, 4, prompt_logprobs=k)["choices"][0]["prompt_logprobs"]
    live.reset()
    live.generate(P, 1)
    assert live.hit(P) == 64
    warm = live.generate(P, 4, prompt_logprobs=k)["choices"][0]["prompt_logprobs"]
    assert len(warm) == 70
    assert warm[0] is None
    for token_id, a, b in zip(P[1:], warm[1:], cold[1:], strict=True):
        assert abs(a[str(token_id)]["logprob"] - b[str(token_id)]["logprob"]) < 1e-3
        assert len(a) in (k, k + 1) if k else len(a) == 1
    assert live.hit(P) == 64


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64, 65])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs_scores_prompt_and_output(live: Live, length: int, max_tokens: int) -> None:
    prompt = P[:length]
    live.reset()
    body: dict[str, Any] = {"echo": True, "logprobs": 2, "return_tokens_as_token_ids": True}
    cold = live.generate(prompt, max_tokens, **body)
    warm = live.generate(prompt, max_tokens, **body)
    right = live.generate(prompt, 1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    for reply in (cold, warm):
        (choice,) = reply["choices"]
        assert len(choice["token_ids"]) == max_tokens
        shown = choice["logprobs"]
        assert shown["tokens"] == [f"token_id:{i}" for i in prompt + choice["token_ids"]]
        expected = [None, *(entry[str(i)]["logprob"] for i, entry in zip(prompt[1:], right[1:], strict=True))]
        assert close(shown["token_logprobs"][:length], expected)
        assert [len(shown[name]) for name in ("top_logprobs", "text_offset")] == [length + max_tokens] * 2
        assert shown["top_logprobs"][0] is None


def test_a_chat_may_be_scored_too(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "prompt_logprobs": 0}
    reply = live.post("/v1/chat/completions", **body)
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert cached(reply) == 0


def test_several_choices_show_the_scores_of_their_prompt(live: Live) -> None:
    reply = live.generate(P, 2, n=2, seed=1, temperature=1, echo=True, logprobs=1)
    first, second = (choice["logprobs"]["token_logprobs"] for choice in reply["choices"])
    assert first[:70] == second[:70]
    assert len(first) == len(second) == 72


def test_min_tokens_holds_stop_tokens_back(live: Live) -> None:
    prompt = ids(7, 20)
    first = live.generate(prompt, 1)["choices"][0]["token_ids"][0]
    short = live.generate(prompt, 12, stop_token_ids=[first])["choices"][0]["token_ids"]
    long = live.generate(prompt, 12, stop_token_ids=[first], min_tokens=5)["choices"][0]["token_ids"]
    assert (len(short), first in long[:5]) == (1, False)
    assert len(long) > 5


# -- streamed: the same, in the first chunk of each choice -------------------------------------------------------------

SCORING: list[dict[str, Any]] = [
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 0, "return_tokens_as_token_ids": True},
    {"prompt_logprobs": 3},
    {"prompt_logprobs": 0, "logprobs": 2, "echo": True},  # the prompt's entries show one token here and two there
    {"prompt_logprobs": 1, "echo": True},
]


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, as the whole reply has them."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {**part, "text": "", "logprobs": None})
            whole["text"] += part["text"]
            whole |= {name: part[name] for name in ("finish_reason", "stop_reason") if part["finish_reason"]}
            if part["logprobs"] is not None:
                shown = whole["logprobs"] = whole["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    shown[name] += values
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("wanted", SCORING, ids=str)
@pytest.mark.parametrize("prompt", ["hello there", [P[:40], P[:17]]], ids=["text", "two lists"])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_stream_scores_as_the_whole_reply_does(
    live: Live, wanted: dict[str, Any], prompt: Any, max_tokens: int
) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **wanted}
    live.reset()
    whole = live.post("/v1/completions", **body)["choices"]
    live.reset()
    events = chunks(live, **body)
    assert put_together(events) == whole
    firsts = {event["choices"][0]["index"]: event["choices"][0] for event in reversed(events)}
    for index, choice in enumerate(whole):
        if wanted.get("logprobs") is not None:
            num_tokens = len(choice["logprobs"]["tokens"])
            assert len(firsts[index]["logprobs"]["tokens"]) == num_tokens - max(0, max_tokens - 1)
        if "prompt_logprobs" in wanted:
            num_top = wanted["prompt_logprobs"]
            assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {max(1, num_top), num_top + 1}
            assert firsts[index]["prompt_logprobs"] == choice["prompt_logprobs"]


def test_a_streamed_choice_waits_for_the_scores_of_its_prompt(make_engine: Any) -> None:
    """The first choice scores the prompt and so may not use the cache; the second one does, and is done long before."""
    with serving(make_engine(max_num_batched_tokens=16, long_prefill_token_threshold=8)) as live:
        body = {"prompt": P, "max_tokens": 2, "n": 2, "seed": 1, "temperature": 1, "echo": True, "logprobs": 1}
        live.generate(P, 1)
        events = chunks(live, **body)
        assert [event["choices"][0]["index"] for event in events[:2]] == [1, 1]
        for event in (events[0], events[2]):
            assert len(event["choices"][0]["logprobs"]["tokens"]) == 71
        assert put_together(events) == live.post("/v1/completions", **body)["choices"]


def test_a_streamed_chat_is_scored_in_its_first_chunk(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "prompt_logprobs": 1, "temperature": 0}
    whole = live.post("/v1/chat/completions", **body)
    first, *others = chunks(live, "/v1/chat/completions", **body)
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in event for event in others)


def test_a_scored_prompt_streams_its_echo_and_no_token(live: Live) -> None:
    (event,) = chunks(live, prompt="hello", max_tokens=0, echo=True, logprobs=0)
    (choice,) = event["choices"]
    assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("hello", "length", 6)


# -- best_of -----------------------------------------------------------------------------------------------------------


def mean(choice: dict[str, Any]) -> float:
    return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])


def test_best_of_gives_the_likeliest_of_what_it_samples_best_first(live: Live) -> None:
    body: dict[str, Any] = {"seed": 3, "temperature": 1}
    for prompts in ([P[:20]], [P[:20], P[20:45]]):
        all_five = live.generate(prompts, 6, n=5, logprobs=0, **body)["choices"]
        reply = live.generate(prompts, 6, n=2, best_of=5, **body)
        right = [
            choice
            for begin in range(0, len(all_five), 5)
            for choice in sorted(all_five[begin : begin + 5], key=mean, reverse=True)[:2]
        ]
        assert [choice["token_ids"] for choice in reply["choices"]] == [choice["token_ids"] for choice in right]
        assert [choice["index"] for choice in reply["choices"]] == list(range(len(right)))
        assert {choice["logprobs"] for choice in reply["choices"]} == {None}
        assert len({tuple(choice["token_ids"]) for choice in all_five}) == len(all_five)
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, prompts)), 30 * len(prompts))
    same = live.generate(P[:20], 6, n=2, best_of=2, **body)["choices"]
    assert [c["token_ids"] for c in same] == [c["token_ids"] for c in all_five[:2]]  # in the order of their seeds
