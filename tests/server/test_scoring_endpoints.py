"""Scoring a prompt over HTTP: prompt_logprobs, and echo with logprobs, cold and warm."""

from __future__ import annotations

from typing import Any

import pytest
from server_world import Live, cached
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
