"""/v1/completions: what a completion says, whole and streamed."""

from __future__ import annotations

import json

from server_world import Live, cached, chunks, serving
from tiny_llama import ids


def test_a_completion_has_openais_shape(live: Live) -> None:
    live.reset()
    prompt = ids(1, 20)
    reply = live.generate(prompt, 4)
    assert (reply["object"], reply["model"]) == ("text_completion", "tiny")
    (choice,) = reply["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert len(choice["token_ids"]) == 4
    assert choice["prompt_token_ids"] == prompt
    assert reply["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 4,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_says_the_same_as_the_whole(live: Live) -> None:
    body = {"prompt": ids(2, 40), "max_tokens": 12, "temperature": 0, "return_token_ids": True, "logprobs": 2}
    whole = live.post("/v1/completions", **body)
    events = chunks(live, **body, stream_options={"include_usage": True})
    *parts, last = events
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    assert [i for part in parts for i in part["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]
    assert parts[0]["choices"][0]["prompt_token_ids"] == body["prompt"]
    for name in ("tokens", "text_offset"):
        assert [v for p in parts for v in p["choices"][0]["logprobs"][name]] == whole["choices"][0]["logprobs"][name]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 11 + ["length"]
    assert {part["usage"] for part in parts} == {None}
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert len({part["id"] for part in events}) == 1


def test_no_event_holds_a_character_that_clients_split_lines_at(live: Live) -> None:
    """Only line feeds end lines of an event stream; str.splitlines, which clients use, knows eight more."""
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e e"
    body = {"prompt": text, "echo": True, "max_tokens": 1, "stream": True}
    with live.client.stream("POST", "/v1/completions", json=body) as reply:
        sent = b"".join(reply.iter_raw()).decode()
    lines = sent.splitlines()
    assert lines == sent.split("\n")[:-1]
    (choice,) = json.loads(lines[0].removeprefix("data: "))["choices"]
    assert choice["text"].startswith(text)


def test_without_include_usage_no_chunk_has_usage(live: Live) -> None:
    assert all("usage" not in chunk for chunk in chunks(live, prompt=[8, 9], max_tokens=2))


def test_several_prompts_of_both_kinds_keep_their_order(live: Live) -> None:
    live.reset()
    texts = live.generate(["ab", "cd"], 3, n=2, seed=1)
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert texts["usage"]["prompt_tokens"] == 6  # two of <s> and two bytes, once each
    assert texts["usage"]["completion_tokens"] == 12
    lists = live.generate([ids(3, 20), ids(4, 30)], 3)
    assert [choice["prompt_token_ids"] for choice in lists["choices"]] == [ids(3, 20), ids(4, 30)]
    single = live.generate(ids(4, 30), 3)
    assert single["choices"][0]["token_ids"] == lists["choices"][1]["token_ids"]
    assert cached(single) == 16


def test_echo_puts_the_prompt_before_the_output(live: Live) -> None:
    plain = live.generate("hello", 3)["choices"][0]["text"]
    assert live.generate("hello", 3, echo=True)["choices"][0]["text"] == "hello" + plain
    events = chunks(live, prompt="hello", max_tokens=3, temperature=0, echo=True)
    assert "".join(event["choices"][0]["text"] for event in events) == "hello" + plain
    as_ids = live.post("/tokenize", prompt="hello")["tokens"]
    assert live.generate(as_ids, 3, echo=True)["choices"][0]["text"] == "hello" + plain


def test_logprobs_name_the_chosen_token_first_and_k_likeliest(live: Live) -> None:
    prompt = ids(5, 20)
    logprobs = live.generate(prompt, 3, logprobs=2, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    token_ids = live.generate(prompt, 3)["choices"][0]["token_ids"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in token_ids]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == max(top.values())


def test_two_likely_tokens_of_one_text_are_both_there(live: Live) -> None:
    tops = live.generate(ids(6, 20), 20, logprobs=20)["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(top) for top in tops] == [20] * 20  # among them bytes that decode to U+FFFD alone


def test_stop_strings_stop_tokens_and_bias_end_or_bend_the_output(live: Live) -> None:
    prompt = ids(7, 20)
    free = live.generate(prompt, 12)["choices"][0]
    third = free["token_ids"][2]
    by_token = live.generate(prompt, 12, stop_token_ids=[third])["choices"][0]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", third)
    assert len(by_token["token_ids"]) == free["token_ids"].index(third) + 1
    stop = free["text"][3:6]  # inside tokens of several characters, or across them
    by_text = live.generate(prompt, 12, stop=[stop])["choices"][0]
    assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", stop)
    assert by_text["text"] == free["text"][: free["text"].index(stop)]
    biased = live.generate(prompt, 4, logit_bias={"65": 100})["choices"][0]
    assert biased["token_ids"] == [65] * 4


def test_n_choices_are_the_requests_of_their_seeds_and_the_prompt_counts_once(live: Live) -> None:
    live.reset()
    prompt = ids(2400, 40)
    body = {"temperature": 1, "seed": 5}
    reply = live.generate(prompt, 40, n=4, **body)
    outputs = [choice["token_ids"] for choice in reply["choices"]]
    assert len(set(map(tuple, outputs))) == 4
    assert len({tuple(output[:8]) for output in outputs}) == 4  # they part inside the block that they share
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (40, 160)
    assert cached(reply) == 0
    warm = live.generate(prompt, 40, n=4, **body)
    assert [choice["token_ids"] for choice in warm["choices"]] == outputs
    assert cached(warm) == 32
    for index, output in enumerate(outputs):
        single = live.generate(prompt, 40, temperature=1, seed=5 + index)
        assert single["choices"][0]["token_ids"] == output
    streamed: dict[int, list[int]] = {}
    for chunk in chunks(live, prompt=prompt, max_tokens=40, n=4, return_token_ids=True, **body):
        (choice,) = chunk["choices"]
        streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [streamed[index] for index in range(4)] == outputs


def test_n_choices_compute_the_prompt_once(live: Live) -> None:
    live.reset()
    before = live.metrics()["prompt_tokens_computed_total"]
    live.generate(ids(9, 64), 2, n=4)
    # The first choice computes 64; the others share its 3 full blocks that they may, and compute 16 each.
    assert live.metrics()["prompt_tokens_computed_total"] - before == 64 + 3 * 16


def test_n_choices_in_a_pool_that_is_too_small_for_them_are_the_same(make_engine, live: Live) -> None:
    prompt, body = ids(2400, 40), {"temperature": 1, "seed": 5, "n": 4}
    wide = live.generate(prompt, 40, **body)
    with serving(make_engine(num_blocks=11)) as narrow:  # 2 shared, 3 more each: 2.5 choices fit, roughly
        tight = narrow.generate(prompt, 40, **body)
        assert narrow.metrics()["num_preemptions_total"] > 0
    assert [c["token_ids"] for c in tight["choices"]] == [c["token_ids"] for c in wide["choices"]]


def test_each_chunk_may_count_the_tokens_so_far(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ids(1, 20), "n": 2, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    *steps, last = chunks(live, **body, stream_options=options)
    counts = [step["usage"] for step in steps]
    assert [count["completion_tokens"] for count in counts] == list(range(1, 9))
    assert all(count["prompt_tokens"] == 20 == count["total_tokens"] - count["completion_tokens"] for count in counts)
    assert last["usage"]["completion_tokens"] == 8
    assert "prompt_tokens_details" not in counts[0]  # the hit is told once, at the end
    assert cached(last) >= 0
