"""Claims: an engine over any executor gives what the executor would give alone, and leaves nothing behind however a
request ends. The executor is a pure function of the tokens that it reads back from its slots."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine_fakes import EOS, VOCAB_SIZE, ByteTokenizer, make_engine, reciting, run, scrambled

from anaphora.engine.outputs import Logprob
from anaphora.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    EngineBusyError,
    EngineStoppedError,
    InvalidParameterError,
    InvalidTokenError,
    PromptTooLongError,
    UnknownRequestError,
)
from anaphora.sampling_params import SamplingParams

PROMPT = list(range(40, 60))


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    """What the fake model generates, without any engine."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(scrambled(tokens))
    return tokens[len(prompt) :]


def idle(engine) -> tuple:
    """What must be as before when nothing runs: live blocks and requests; and it is still serving."""
    gauges = engine.stats().gauges
    return gauges.num_live_blocks, gauges.num_running, gauges.num_waiting, gauges.num_following, engine.has_unfinished


NOTHING = (0, 0, 0, 0, False)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [3, 7, 64])
@pytest.mark.parametrize("num_blocks", [12, 64])  # 12 blocks of 4: two requests fit, the rest wait or are preempted
def test_tokens_are_the_models_own_under_chunks_sharing_and_preemption(caching, budget, num_blocks):
    engine, _, _ = make_engine(enable_prefix_caching=caching, max_num_batched_tokens=budget, num_blocks=num_blocks)
    prompts = {f"r{i}": [*PROMPT[: 20 - i], i, i + 1] for i in range(5)} | {"again": [*PROMPT, 0, 1]}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=9))
    outputs, deltas = run(engine)
    for request_id, prompt in prompts.items():
        output = outputs[request_id]
        assert output.outputs[0].token_ids == alone(prompt, 9)
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].finish_reason == "length"
        assert [i for delta in deltas[request_id] for i in delta.token_ids] == output.outputs[0].token_ids
        assert "".join(delta.text for delta in deltas[request_id]) == output.outputs[0].text
        assert output.outputs[0].text == ByteTokenizer().decode(output.outputs[0].token_ids)
    assert idle(engine) == NOTHING


def test_a_repeated_prompt_is_cached_in_whole_blocks_and_another_salt_is_not():
    engine, _, _ = make_engine()
    hits = []
    for number, salt in enumerate([None, None, "a", "a", None]):
        engine.add_request(str(number), PROMPT, SamplingParams(max_tokens=1), cache_salt=salt)
        (output,) = run(engine)[0].values()
        hits.append((output.num_cached_tokens, output.metrics.num_computed_prompt_tokens))
    assert hits == [(0, 20), (16, 4), (0, 20), (16, 4), (16, 4)]


def test_times_are_taken_where_things_happen():
    engine, executor, clock = make_engine(max_num_batched_tokens=16)

    def compute(plan):
        clock.now_s += 10

    executor.before = compute
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=3), arrival_s=98.0)
    clock.now_s += 1
    (output,) = run(engine)[0].values()
    metrics = output.metrics
    assert (metrics.arrival_s, metrics.ttft_s, metrics.e2e_s) == (98.0, 23.0, 43.0)
    assert (metrics.num_computed_prompt_tokens, metrics.num_preemptions) == (20, 0)
    times = engine.stats().times
    assert (times.execute_s, times.compute_s, times.sample_s) == (40.0, 1.0, 0.5)


def test_the_tokenizer_runs_inside_the_time_to_first_token():
    class SlowTokenizer(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            clock.now_s += 5
            return super().encode(text, add_special_tokens=add_special_tokens)

    engine, _, clock = make_engine(tokenizer=SlowTokenizer())
    engine.add_request("a", "text", SamplingParams(max_tokens=1))
    (output,) = run(engine)[0].values()
    assert (output.prompt, output.metrics.ttft_s) == ("text", 5.0)
    assert engine.stats().times.add_s == 5.0


def test_preempted_requests_count_what_they_computed_before_their_first_token():
    engine, executor, clock = make_engine(num_blocks=8, max_num_batched_tokens=8, enable_prefix_caching=False)

    def compute(plan):
        clock.now_s += 1

    executor.before = compute
    for name in ("a", "b"):
        engine.add_request(name, PROMPT[:12], SamplingParams(max_tokens=16))
    outputs, _ = run(engine)
    assert outputs["a"].metrics.num_preemptions == 0
    assert outputs["b"].metrics.num_preemptions >= 1
    assert outputs["a"].metrics.num_computed_prompt_tokens == outputs["b"].metrics.num_computed_prompt_tokens == 12
    assert outputs["b"].outputs[0].token_ids == alone(PROMPT[:12], 16)


@pytest.mark.parametrize("ignore", [False, True])
def test_an_end_token_is_in_the_tokens_and_not_in_the_text(ignore):
    engine, _, _ = make_engine(reciting("héllo"))
    engine.add_request("a", "abcd", SamplingParams(max_tokens=8, ignore_eos=ignore, skip_special_tokens=not ignore))
    (output,) = run(engine)[0].values()
    completion = output.outputs[0]
    assert completion.token_ids == [*"héllo".encode(), EOS, *[EOS] * ignore]
    assert completion.text == "héllo" + "<eos><eos>" * ignore
    assert (completion.finish_reason, completion.stop_reason) == ("length" if ignore else "stop", None)


@pytest.mark.parametrize(("include", "text"), [(False, "he"), (True, "hel")])
def test_a_stop_token_ends_the_output_and_is_named(include, text):
    engine, _, _ = make_engine(reciting("hello"))
    params = SamplingParams(max_tokens=9, stop_token_ids=[ord("l")], include_stop_str_in_output=include)
    engine.add_request("a", "abcd", params)
    completion = next(iter(run(engine)[0].values())).outputs[0]
    assert (completion.text, completion.token_ids) == (text, list(b"hel"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ord("l"))


@pytest.mark.parametrize(("include", "text"), [(False, "one €"), (True, "one € two")])
def test_a_stop_string_across_tokens_ends_the_request_and_frees_its_blocks(include, text):
    engine, executor, _ = make_engine(reciting("one € two three"))
    engine.add_request("a", "abcd", SamplingParams(max_tokens=50, stop=[" two"], include_stop_str_in_output=include))
    outputs, deltas = run(engine)
    completion = outputs["a"].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", " two")
    assert completion.token_ids == list("one € two".encode())
    assert "".join(delta.text for delta in deltas["a"]) == text
    assert [delta.text for delta in deltas["a"][:5]] == ["o", "n", "e", "", ""]  # " " may begin " two": held back
    assert len(executor.plans) == 11
    assert idle(engine) == NOTHING


def test_a_stop_string_completed_by_the_last_token_is_a_stop():
    engine, _, _ = make_engine(reciting("abEND"))
    engine.add_request("a", "abcd", SamplingParams(max_tokens=5, stop="END"))
    completion = next(iter(run(engine)[0].values())).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", "END")
    assert idle(engine) == NOTHING


def test_the_beginning_of_a_stop_string_is_given_out_if_the_rest_never_comes():
    engine, _, _ = make_engine(reciting("abEN"))
    engine.add_request("a", "abcd", SamplingParams(max_tokens=9, stop="END"))
    outputs, deltas = run(engine)
    assert (outputs["a"].outputs[0].text, outputs["a"].outputs[0].finish_reason) == ("abEN", "stop")
    assert [delta.text for delta in deltas["a"]] == ["a", "b", "", "", "EN"]


def test_an_unfinished_character_is_given_out_at_the_end_behind_what_was_held_back():
    engine, _, _ = make_engine(reciting(b"abEN\xe2\x82"))
    engine.add_request("a", "abcd", SamplingParams(max_tokens=6, stop="END"))
    outputs, deltas = run(engine)
    assert outputs["a"].outputs[0].text == "abEN\ufffd"
    assert [delta.text for delta in deltas["a"]] == ["a", "b", "", "", "", "EN\ufffd"]


def test_logprobs_name_the_chosen_token_first_and_no_token_twice():
    engine, _, _ = make_engine(reciting("hi"))
    for top, name in ((None, "none"), (0, "chosen"), (2, "two")):
        engine.add_request(name, "abcd", SamplingParams(max_tokens=1, logprobs=top))
    outputs, deltas = run(engine)
    chosen = Logprob(-0.5, 1, "h")
    assert outputs["none"].outputs[0].logprobs is None
    assert outputs["chosen"].outputs[0].logprobs == [{ord("h"): chosen}]
    assert outputs["two"].outputs[0].logprobs == [{ord("h"): chosen, ord("i"): Logprob(-0.5, 1, "i")}]
    assert deltas["two"][0].logprobs == ({ord("h"): chosen, ord("i"): Logprob(-0.5, 1, "i")},)
    assert list(deltas["two"][0].logprobs[0]) == [ord("h"), ord("i")]


def test_without_a_tokenizer_token_ids_go_in_and_come_out():
    engine, _, _ = make_engine(tokenizer=None)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=3, logprobs=0))
    (output,) = run(engine)[0].values()
    assert (output.prompt, output.outputs[0].text, output.outputs[0].token_ids) == (None, "", alone(PROMPT, 3))
    assert list(output.outputs[0].logprobs[0].values()) == [Logprob(-0.5, 1, None)]


def test_special_tokens_are_added_unless_the_text_holds_them():
    engine, _, _ = make_engine()
    engine.add_request("a", "<bos>x", SamplingParams(max_tokens=1))
    engine.add_request("b", "<bos>x", SamplingParams(max_tokens=1), add_special_tokens=False)
    outputs, _ = run(engine)
    assert outputs["a"].prompt_token_ids == [EOS, *b"<bos>x"]
    assert outputs["b"].prompt_token_ids == list(b"<bos>x")


def test_seeds_are_the_callers_or_drawn_by_a_counter_that_nothing_else_moves():
    drawn = []
    for disturbances, seed in ((0, 0), (2, 0), (0, 1)):
        engine, executor, _ = make_engine(seed=seed)
        engine.add_request("first", PROMPT, SamplingParams(max_tokens=1))
        for number in range(disturbances):
            engine.add_request(f"own-{number}", PROMPT, SamplingParams(max_tokens=1, seed=5))
            with pytest.raises(PromptTooLongError):
                engine.add_request("long", [1] * 500, SamplingParams())
        engine.add_request("second", PROMPT, SamplingParams(max_tokens=1))
        run(engine)
        assert executor.seeds.get("own-0") == (5 if disturbances else None)
        drawn.append((executor.seeds["first"], executor.seeds["second"]))
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) == 4
    assert all(0 <= seed < 2**63 for pair in drawn for seed in pair)


# -- wrong requests ----------------------------------------------------------------------------------------------------

WRONG = {
    "no tokens": (EmptyPromptError, {"prompt": []}),
    "no text": (EmptyPromptError, {"prompt": ""}),
    "no array": (EmptyPromptError, {"prompt": np.array([], dtype=np.int64)}),
    "negative": (InvalidTokenError, {"prompt": [1, -1]}),
    "beyond the vocabulary": (InvalidTokenError, {"prompt": [1, VOCAB_SIZE]}),
    "huge": (InvalidTokenError, {"prompt": [1, 2**70]}),
    "bool": (InvalidTokenError, {"prompt": [1, True]}),
    "float": (InvalidTokenError, {"prompt": [1, 2.0]}),
    "text among ids": (InvalidTokenError, {"prompt": [1, "2"]}),
    "none among ids": (InvalidTokenError, {"prompt": [1, None]}),
    "numpy bool": (InvalidTokenError, {"prompt": [1, np.bool_(True)]}),
    "numpy float": (InvalidTokenError, {"prompt": np.array([1.0, 2.0])}),
    "bool array": (InvalidTokenError, {"prompt": np.array([True])}),
    "two dimensions": (InvalidTokenError, {"prompt": np.array([[1, 2]])}),
    "nested": (InvalidTokenError, {"prompt": [[1, 2]]}),
    "bytes": (InvalidParameterError, {"prompt": b"abc"}),
    "number": (InvalidParameterError, {"prompt": 5}),
    "nothing": (InvalidParameterError, {"prompt": None}),
    "set": (InvalidParameterError, {"prompt": {1, 2}}),
    "half a surrogate pair": (InvalidParameterError, {"prompt": "a\ud800"}),
    "too long": (PromptTooLongError, {"prompt": [1] * 200}),
    "empty salt": (InvalidParameterError, {"cache_salt": ""}),
    "salt of bytes": (InvalidParameterError, {"cache_salt": b"a"}),
    "salt with half a surrogate pair": (InvalidParameterError, {"cache_salt": "a\udc00"}),
    "priority of text": (InvalidParameterError, {"priority": "1"}),
    "priority of bool": (InvalidParameterError, {"priority": True}),
    "bias beyond the vocabulary": (InvalidParameterError, {"sampling": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}),
    "stop beyond the vocabulary": (InvalidParameterError, {"sampling": SamplingParams(stop_token_ids=[VOCAB_SIZE])}),
    "no sampling parameters": (InvalidParameterError, {"sampling": {"max_tokens": 1}}),
    "empty id": (InvalidParameterError, {"request_id": ""}),
    "id of int": (InvalidParameterError, {"request_id": 7}),
    "alive already": (DuplicateRequestError, {"request_id": "alive"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_refused_and_nothing_of_it_stays(case):
    error, wrong = WRONG[case]
    engine, _, _ = make_engine()
    engine.add_request("alive", PROMPT, SamplingParams(max_tokens=2))
    before = dataclasses.replace(engine.stats(), times=None)
    arguments = {"request_id": "new", "prompt": PROMPT, "sampling": SamplingParams(max_tokens=2)} | wrong
    with pytest.raises(error):
        engine.add_request(**arguments)
    assert dataclasses.replace(engine.stats(), times=None) == before
    assert engine.num_unfinished == 1
    engine.add_request("new", PROMPT, SamplingParams(max_tokens=2))
    outputs, _ = run(engine)
    assert outputs["alive"].outputs[0].token_ids == outputs["new"].outputs[0].token_ids == alone(PROMPT, 2)


@pytest.mark.parametrize(
    ("limits", "limit"), [({"max_model_len": 8}, 8), ({"num_blocks": 5, "max_model_len": None}, 20)]
)
def test_a_text_far_too_long_is_refused_before_it_is_tokenised(limits, limit) -> None:
    tokenised: list[int] = []

    class Counting(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            tokenised.append(len(text))
            return [1] * 5  # as if its words were long

    engine, _, _ = make_engine(tokenizer=Counting(), **limits)
    with pytest.raises(PromptTooLongError, match=f"far more than {limit} tokens"):
        engine.add_request("a", "x" * (128 * limit + 1), SamplingParams(max_tokens=1))
    assert (tokenised, idle(engine)) == ([], NOTHING)
    engine.add_request("a", "x" * (128 * limit), SamplingParams(max_tokens=1))
    assert tokenised == [128 * limit]


@pytest.mark.parametrize("wrong", [{"prompt": "text"}, {"sampling": SamplingParams(stop="x")}], ids=["text", "stop"])
def test_text_needs_a_tokenizer(wrong):
    engine, _, _ = make_engine(tokenizer=None)
    with pytest.raises(InvalidParameterError, match=r"needs? a tokenizer"):
        engine.add_request(**{"request_id": "a", "prompt": PROMPT, "sampling": SamplingParams()} | wrong)
    assert idle(engine) == NOTHING


@pytest.mark.parametrize(
    "prompt", [tuple(PROMPT), range(40, 60), np.array(PROMPT), np.array(PROMPT, np.uint8), list(np.array(PROMPT))]
)
def test_integers_of_any_kind_are_token_ids(prompt):
    engine, _, _ = make_engine()
    engine.add_request("a", prompt, SamplingParams(max_tokens=2))
    (output,) = run(engine)[0].values()
    assert output.prompt_token_ids == PROMPT
    assert {type(token_id) for token_id in output.prompt_token_ids} == {int}


def test_an_error_says_which_token_is_wrong():
    engine, _, _ = make_engine()
    with pytest.raises(InvalidTokenError, match=r"token id 257 at position 2 .* \[0, 257\)"):
        engine.add_request("a", [1, 2, 257, 300], SamplingParams())


# -- ends of every kind ------------------------------------------------------------------------------------------------


def test_abort_gives_back_what_there_is_and_every_block():
    engine, _, clock = make_engine(max_num_batched_tokens=20, max_num_seqs=1)
    for name in ("running", "waiting"):
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    clock.now_s += 2
    running, waiting = engine.abort(["running", "waiting", "running"])
    assert running.outputs[0].token_ids == alone(PROMPT, 2)
    assert running.outputs[0].finish_reason == waiting.outputs[0].finish_reason == "abort"
    assert (waiting.outputs[0].token_ids, waiting.metrics.ttft_parts, waiting.metrics.e2e_s) == ([], None, 2.0)
    assert idle(engine) == NOTHING
    assert engine.step() == []
    engine.add_request("running", PROMPT, SamplingParams(max_tokens=1))
    assert run(engine)[0]["running"].num_cached_tokens == 16


def test_aborting_an_unknown_request_aborts_none():
    engine, _, _ = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=1))
    with pytest.raises(UnknownRequestError):
        engine.abort(["a", "b"])
    assert engine.num_unfinished == 1
    run(engine)
    with pytest.raises(UnknownRequestError):
        engine.abort("a")


def test_a_step_that_raises_ends_its_requests_and_the_engine_serves_on():
    engine, executor, _ = make_engine(max_num_seqs=2)
    for name in ("a", "b", "waiting"):
        engine.add_request(name, [*PROMPT, ord(name[0])], SamplingParams(max_tokens=4))

    def fail(plan):
        if plan.step == 2:
            raise RuntimeError("the kernel says no")

    executor.before = fail
    outputs, _ = run(engine)
    for name in ("a", "b"):
        assert outputs[name].error == "the step failed: RuntimeError: the kernel says no"
        assert outputs[name].outputs[0].finish_reason == "error"
        assert outputs[name].outputs[0].token_ids == alone([*PROMPT, ord(name)], 1)
    assert outputs["waiting"].error is None
    assert outputs["waiting"].outputs[0].token_ids == alone([*PROMPT, ord("w")], 4)
    assert idle(engine) == NOTHING
    assert engine.stats().counters.num_failed_steps == 1


def test_what_a_failed_step_wrote_is_found_by_nobody():
    engine, executor, _ = make_engine()

    def fail(plan):
        executor.before = lambda plan: None
        raise RuntimeError

    executor.before = fail
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=1))
    run(engine)
    engine.add_request("b", PROMPT, SamplingParams(max_tokens=1))
    assert run(engine)[0]["b"].num_cached_tokens == 0


def test_a_request_whose_output_is_not_finite_ends_alone():
    engine, executor, _ = make_engine()
    engine.add_request("bad", PROMPT, SamplingParams(max_tokens=3))
    engine.add_request("good", PROMPT[::-1], SamplingParams(max_tokens=3))
    executor.failed = {"bad"}
    outputs, _ = run(engine)
    assert (outputs["bad"].outputs[0].finish_reason, outputs["bad"].error) == ("error", "non-finite logits")
    assert outputs["bad"].metrics.num_computed_prompt_tokens == 0
    assert outputs["good"].outputs[0].token_ids == alone(PROMPT[::-1], 3)
    assert idle(engine) == NOTHING


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_rolls_back_goes_on_to_the_caller_and_loses_no_end(interrupt):
    engine, executor, _ = make_engine(max_num_seqs=1)
    for name in ("a", "waiting"):
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=2))

    def fail(plan):
        executor.before = lambda plan: None
        raise interrupt

    executor.before = fail
    with pytest.raises(interrupt):
        engine.step()
    assert engine.stats().gauges.num_live_blocks == 0
    with pytest.raises(DuplicateRequestError):
        engine.add_request("a", PROMPT, SamplingParams())
    outputs, _ = run(engine)
    assert (outputs["a"].outputs[0].finish_reason, outputs["waiting"].num_cached_tokens) == ("error", 0)
    assert outputs["waiting"].outputs[0].token_ids == alone(PROMPT, 2)
    assert idle(engine) == NOTHING


def test_a_request_ended_by_an_interrupt_can_be_aborted_instead_of_delivered():
    engine, executor, _ = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=2))

    def fail(plan):
        raise KeyboardInterrupt

    executor.before = fail
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    (output,) = engine.abort("a")
    assert output.outputs[0].finish_reason == "error"
    assert idle(engine) == NOTHING


def test_a_tokenizer_that_fails_costs_one_request():
    class Fragile(ByteTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=False):
            if ord("!") in token_ids:
                raise KeyError("!")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    engine, _, _ = make_engine(reciting("ab!cd"), tokenizer=Fragile())
    engine.add_request("a", "abcd", SamplingParams(max_tokens=5))
    (output,) = run(engine)[0].values()
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("error", "ab")
    assert "KeyError" in output.error
    assert idle(engine) == NOTHING


def test_a_request_without_its_token_is_a_failed_step_not_an_endless_one():
    engine, executor, _ = make_engine()
    executor._sample = lambda request: None
    execute = executor.execute
    executor.execute = lambda plan: dataclasses.replace(execute(plan), sampled={})
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=2))
    (output,) = run(engine)[0].values()
    assert "neither a token nor an error" in output.error
    assert idle(engine) == NOTHING


def test_reset_tells_the_truth():
    engine, _, _ = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=4))
    engine.step()
    assert engine.reset_prefix_cache() is False
    assert engine.reset_prefix_cache(preempt_running=True) is True
    outputs, _ = run(engine)
    assert outputs["a"].outputs[0].token_ids == alone(PROMPT, 4)
    assert outputs["a"].metrics.num_preemptions == 1
    assert engine.reset_prefix_cache() is True
    assert engine.stats().gauges.num_cached_blocks == 0


def test_an_idle_engine_steps_without_effect():
    engine, executor, _ = make_engine()
    assert (engine.step(), engine.has_unfinished, executor.plans) == ([], False, [])


# -- calls one at a time -----------------------------------------------------------------------------------------------


def test_a_call_inside_a_step_is_refused_and_the_step_goes_on() -> None:
    engine, executor, _ = make_engine()
    refused: list[str] = []
    execute = executor.execute

    def meddle(plan):  # type: ignore[no-untyped-def]
        for call in (engine.step, lambda: engine.abort("a"), engine.reset_prefix_cache):
            with pytest.raises(EngineBusyError) as error:
                call()
            refused.append(str(error.value))
        return execute(plan)

    executor.execute = meddle
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=1))
    (step,) = engine.step()
    assert step.output is not None
    assert step.output.outputs[0].finish_reason == "length"
    assert len(refused) == 3


def test_an_engine_whose_bookkeeping_was_broken_off_says_so_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, *_ = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=1))

    def alarm(*_: object) -> None:
        raise TimeoutError("a signal handler of the user's")

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler.cache, "commit", alarm)
        with pytest.raises(TimeoutError):
            engine.step()
    for call in (engine.step, lambda: engine.add_request("b", [1], SamplingParams())):
        with pytest.raises(EngineStoppedError, match="make a new one"):
            call()
