"""Claims: log-probabilities of a prompt arrive whole and once, however the prompt was cut; and the first min_tokens
tokens cannot end a request."""

from __future__ import annotations

import pytest
from engine_fakes import EOS, ByteTokenizer, make_engine, reciting, run

from anaphora.engine.outputs import Logprob
from anaphora.errors import InvalidParameterError
from anaphora.sampling_params import MAX_LOGPROBS, SamplingParams

PROMPT = list(b"abcdefghij")


def expected(num_tokens: int = len(PROMPT)) -> list[dict[int, Logprob] | None]:
    """What the fake executor says of PROMPT."""
    entries: list[dict[int, Logprob] | None] = [None]
    for position in range(1, num_tokens):
        token = PROMPT[position]
        entry = {token: Logprob(-float(position), position, chr(token))}
        entry.setdefault(66, Logprob(-9.0, 2, "B"))
        entries.append(entry)
    return entries


@pytest.mark.parametrize("budget", [1, 3, 4, 64])
def test_every_prompt_token_has_one_entry_in_the_output_and_in_the_first_delta_only(budget):
    engine, _, _ = make_engine(max_num_batched_tokens=budget)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=3, prompt_logprobs=2))
    outputs, deltas = run(engine)
    assert outputs["a"].prompt_logprobs == expected()
    assert [delta.prompt_logprobs for delta in deltas["a"]] == [expected(), None, None]
    assert outputs["a"].outputs[0].logprobs is None


def test_scoring_alone_gives_one_delta_and_no_token():
    engine, _, _ = make_engine(max_num_batched_tokens=4)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    outputs, deltas = run(engine)
    (delta,) = deltas["a"]
    assert (delta.text, delta.token_ids, delta.prompt_logprobs) == ("", (), expected())
    completion = outputs["a"].outputs[0]
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
    assert outputs["a"].metrics.ttft_s is None


def test_none_unless_asked_for():
    engine, _, _ = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=1))
    outputs, deltas = run(engine)
    assert outputs["a"].prompt_logprobs is None
    assert deltas["a"][0].prompt_logprobs is None


def test_a_request_that_is_aborted_in_its_prompt_has_what_was_known():
    engine, _, _ = make_engine(max_num_batched_tokens=4)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))
    engine.step()
    (output,) = engine.abort("a")
    assert output.prompt_logprobs == expected(5)  # 4 computed positions tell 4 tokens


def test_a_preempted_prompt_gives_its_entries_once():
    engine, executor, _ = make_engine(max_num_batched_tokens=4)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=2))
    for _ in range(2):
        engine.step()
    assert engine.reset_prefix_cache(preempt_running=True)  # what it had computed is gone
    outputs, _ = run(engine)
    starts = [r.start for plan in executor.plans for r in plan.scheduled if r.request_id == "a"]
    assert starts == [0, 4, 0, 4, 8]
    assert outputs["a"].prompt_logprobs == expected()


def test_a_tokenizer_that_fails_on_a_prompt_token_costs_one_request():
    class Failing(ByteTokenizer):
        def decode(self, token_ids, **options):
            if list(token_ids) == [ord("f")]:
                raise ValueError("no f")
            return super().decode(token_ids, **options)

    engine, _, _ = make_engine(tokenizer=Failing(), max_num_batched_tokens=4)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=0))
    engine.add_request("b", [1], SamplingParams(max_tokens=2))
    outputs, _ = run(engine)
    assert "no f" in outputs["a"].error
    assert outputs["b"].outputs[0].finish_reason == "length"


# -- min_tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"),
    [(0, "one ", "two"), (7, "one two three ", "two"), (99, "one two three two four", None)],
)
def test_a_stop_string_counts_only_if_it_ends_after_the_first_min_tokens_tokens(min_tokens, text, stop):
    engine, _, _ = make_engine(reciting("one two three two four"))
    params = SamplingParams(max_tokens=99, min_tokens=min_tokens, stop=["two"], stop_token_ids=[EOS])
    engine.add_request("a", "abcd", params)
    outputs, deltas = run(engine)
    completion = outputs["a"].outputs[0]
    assert completion.text.removesuffix("<eos>" * 77) == text
    assert completion.stop_reason == stop
    assert "".join(delta.text for delta in deltas["a"]) == completion.text


def test_a_stop_string_may_begin_in_the_first_min_tokens_tokens():
    engine, _, _ = make_engine(reciting("one two three"))
    engine.add_request("a", "abcd", SamplingParams(max_tokens=13, min_tokens=6, stop=["two"]))
    completion = run(engine)[0]["a"].outputs[0]
    assert (completion.text, completion.stop_reason) == ("one ", "two")
    assert len(completion.token_ids) == 7


def test_an_end_token_that_comes_too_early_is_one_like_any_other():
    engine, executor, _ = make_engine(reciting("hi"))
    engine.add_request("a", "abcd", SamplingParams(max_tokens=9, min_tokens=4, skip_special_tokens=True))
    completion = run(engine)[0]["a"].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == ([*b"hi", EOS, EOS, EOS], "stop")
    assert executor.plans[0].admitted[0].end_token_ids == {EOS}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"min_tokens": True}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),  # more than max_tokens
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": MAX_LOGPROBS + 1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens"),
    ],
)
def test_wrong_parameters_are_refused_by_name(options, field):
    with pytest.raises(InvalidParameterError, match=f"^{field} "):
        SamplingParams(**options)
