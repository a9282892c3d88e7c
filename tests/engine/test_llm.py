"""Claims: `LLM` keeps order, checks everything before anything runs, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from engine_fakes import EOS, ByteTokenizer, make_engine, scrambled

from anaphora.api.llm import LLM
from anaphora.errors import AnaphoraError, InvalidParameterError, InvalidTokenError
from anaphora.sampling_params import SamplingParams

PROMPTS = [[1, 2, 3], "two", [4]]
THREE = SamplingParams(max_tokens=3)


class ChatTokenizer(ByteTokenizer):
    chat_template = "a template"

    def apply_chat_template(self, messages, *, tools, tokenize, add_generation_prompt):
        assert tokenize is False
        if messages[0]["role"] == "villain":
            raise ValueError("no villains")
        text = "<bos>" + "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + (f"<tools {len(tools)}>" if tools else "") + "<assistant>" * add_generation_prompt


def make_llm(**options):
    engine, executor, clock = make_engine(**options)
    return LLM.from_engine(engine), executor, clock


def leaves_nothing(llm) -> bool:
    gauges = llm.stats().gauges
    return (gauges.num_live_blocks, gauges.num_running, gauges.num_waiting, llm.engine.num_unfinished) == (0, 0, 0, 0)


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first():
    llm, _, _ = make_llm(max_num_seqs=2)
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 3)]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3], list(b"two"), [4]]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 1, 3]
    assert leaves_nothing(llm)


@pytest.mark.parametrize("prompt", ["text", [5, 6], (5, 6), range(5, 7), np.array([5, 6]), [np.int64(5), np.int64(6)]])
def test_one_prompt_gives_a_list_of_one(prompt):
    llm, _, _ = make_llm()
    (output,) = llm.generate(prompt, THREE)
    assert output.prompt_token_ids == (list(b"text") if isinstance(prompt, str) else [5, 6])


def test_several_prompts_may_be_arrays_and_no_prompts_give_no_outputs():
    llm, _, _ = make_llm()
    assert [o.prompt_token_ids for o in llm.generate([np.array([5, 6]), np.array([7])], THREE)] == [[5, 6], [7]]
    assert llm.generate([]) == []


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {1: 2}, {"a"}])
def test_what_is_no_prompt_is_refused(prompts):
    llm, _, _ = make_llm()
    with pytest.raises(InvalidParameterError):
        llm.generate(prompts)


def test_a_lone_float_prompt_is_a_wrong_token_not_a_list_of_prompts():
    llm, _, _ = make_llm()
    with pytest.raises(InvalidTokenError):
        llm.generate([1.0, 2.0])


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_wrong_prompt_among_many_stops_all_before_the_first_runs(wrong):
    llm, executor, _ = make_llm()
    prompts = [[1, 2, 3]] * 3
    prompts[wrong] = [1, -5]
    with pytest.raises(InvalidTokenError) as caught:
        llm.generate(prompts, THREE)
    assert caught.value.__notes__ == [f"in prompt {wrong} of 3"]
    assert executor.plans == []
    assert leaves_nothing(llm)
    assert llm.generate([1, 2, 3], THREE)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["sampling_params", "cache_salt", "priority"])
def test_lists_of_options_must_be_as_long_as_the_prompts(name):
    value = {"sampling_params": [THREE] * 4, "cache_salt": ["a"], "priority": []}[name]
    llm, _, _ = make_llm()
    with pytest.raises(InvalidParameterError, match=name):
        llm.generate(PROMPTS, **{name: value})
    assert leaves_nothing(llm)


def test_salts_and_priorities_are_given_for_each_prompt():
    llm, executor, _ = make_llm(policy="priority", max_num_seqs=1)
    prompts = [[*range(8), n] for n in range(3)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1), cache_salt=["a", None, "a"], priority=[2, 1, 3])
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 8]
    assert [plan.scheduled[0].token_ids[-1] for plan in executor.plans] == [1, 0, 2]


def test_an_interrupt_aborts_everything():
    llm, executor, _ = make_llm(max_num_seqs=2)

    def interrupt(plan):
        if plan.step == 2:
            raise KeyboardInterrupt

    executor.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, THREE)
    assert leaves_nothing(llm)
    assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, THREE)] == [3, 3, 3]


def test_each_output_is_told_as_it_ends_whatever_its_place():
    llm, executor, _ = make_llm()
    told = []
    params = [SamplingParams(max_tokens=count) for count in (3, 1, 2)]
    outputs = llm.generate(PROMPTS, params, on_output=lambda *ended: told.append((len(executor.plans), *ended)))
    assert told == [(1, 1, outputs[1]), (2, 2, outputs[2]), (3, 0, outputs[0])]


def test_who_is_told_may_stop_everything_and_a_stream_beside_it_goes_on():
    llm, _, _ = make_llm()
    stream = llm.stream(PROMPTS[0], THREE)
    next(stream)
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS[1:], [SamplingParams(max_tokens=1), THREE], on_output=lambda *_: 1 / 0)
    assert llm.engine.num_unfinished == 1
    assert [step.finished for step in stream][-1]
    assert leaves_nothing(llm)


@pytest.fixture
def listens_to_ctrl_c():
    """A process that was started in the background ignores it, and its tests would with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_ctrl_c_waits_for_the_end_of_the_step():
    llm, executor, _ = make_llm()

    def press(plan):
        if plan.step == 2:
            signal.raise_signal(signal.SIGINT)

    executor.before = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, THREE)
    counters = llm.stats().counters
    assert (counters.num_steps, counters.num_failed_steps, counters.num_aborted_requests) == (2, 0, 3)
    assert leaves_nothing(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_a_second_ctrl_c_does_not_wait_and_leaves_nothing_either():
    llm, executor, _ = make_llm()

    def press_twice(plan):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    executor.before = press_twice
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, THREE)
    assert llm.stats().counters.num_failed_steps == 1
    assert leaves_nothing(llm)


def test_a_handler_of_the_program_itself_is_left_alone():
    llm, executor, _ = make_llm()
    presses = []
    executor.before = lambda plan: signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, lambda signum, frame: presses.append(signum))
    try:
        assert len(llm.generate(PROMPTS, THREE)) == 3
    finally:
        signal.signal(signal.SIGINT, before)
    assert presses == [signal.SIGINT] * 3


def test_a_request_that_fails_inside_is_an_output_with_its_error():
    llm, executor, _ = make_llm()
    executor.failed = {"llm-1"}
    good, bad, also_good = llm.generate(PROMPTS, THREE)
    assert (bad.outputs[0].finish_reason, bad.error) == ("error", "non-finite logits")
    assert good.error is also_good.error is None
    assert leaves_nothing(llm)


def test_chat_renders_once_and_adds_no_second_bos():
    llm, _, _ = make_llm(tokenizer=ChatTokenizer())
    turn = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(turn, THREE)
    assert output.prompt == "<bos><user>hi<assistant>"
    assert output.prompt_token_ids == list(b"<bos><user>hi<assistant>")
    assert EOS not in output.prompt_token_ids  # the fake tokenizer's own BOS
    outputs = llm.chat([turn, turn], THREE, tools=[{}], add_generation_prompt=False)
    assert [output.prompt for output in outputs] == ["<bos><user>hi<tools 1>"] * 2


def test_rendering_is_part_of_the_time_to_first_token():
    class Slow(ChatTokenizer):
        def apply_chat_template(self, messages, **options):
            clock.now_s += 7
            return super().apply_chat_template(messages, **options)

    llm, _, clock = make_llm(tokenizer=Slow())
    (output,) = llm.chat([{"role": "user", "content": "hi"}], THREE)
    assert output.metrics.ttft_s == 7.0


@pytest.mark.parametrize(
    "messages",
    ["hi", [], [[]], {"role": "user"}, [{"content": "hi"}], [{"role": 1}], ["hi"], [{"role": "villain"}], [None]],
)
def test_wrong_messages_are_refused(messages):
    llm, executor, _ = make_llm(tokenizer=ChatTokenizer())
    with pytest.raises(InvalidParameterError):
        llm.chat(messages)
    assert executor.plans == []
    assert leaves_nothing(llm)


@pytest.mark.parametrize("tokenizer", [None, ByteTokenizer()])
def test_chat_needs_a_template(tokenizer):
    llm, _, _ = make_llm(tokenizer=tokenizer)
    with pytest.raises(InvalidParameterError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("prompt", ["hi", [{"role": "user", "content": "hi"}]])
def test_a_stream_gives_what_generate_gives(prompt):
    llm, _, _ = make_llm(tokenizer=ChatTokenizer())
    steps = list(llm.stream(prompt, THREE))
    whole = llm.generate(prompt, THREE) if isinstance(prompt, str) else llm.chat(prompt, THREE)
    assert [step.finished for step in steps] == [False, False, True]
    assert steps[-1].output.outputs == whole[0].outputs
    assert "".join(step.text for step in steps) == whole[0].outputs[0].text
    assert leaves_nothing(llm)


def test_a_stream_that_is_closed_early_is_aborted():
    llm, executor, _ = make_llm()
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50))
    assert executor.plans == []
    next(stream)
    assert llm.engine.num_unfinished == 1
    stream.close()
    assert leaves_nothing(llm)


def test_streams_and_generate_share_steps_and_lose_nothing():
    llm, _, _ = make_llm()
    streams = [llm.stream([1, 2, n], SamplingParams(max_tokens=6)) for n in range(2)]
    first = [next(stream) for stream in streams]
    (between,) = llm.generate([9], SamplingParams(max_tokens=20))
    assert len(between.outputs[0].token_ids) == 20
    for n, stream in enumerate(streams):
        steps = [first[n], *stream]
        tokens = [1, 2, n]
        for _ in range(6):
            tokens.append(scrambled(tokens))
        assert [token_id for step in steps for token_id in step.token_ids] == tokens[3:]
    assert leaves_nothing(llm)


def test_requests_of_a_caller_who_drives_the_engine_are_not_taken():
    llm, _, _ = make_llm()
    llm.engine.add_request("theirs", [1, 2], THREE)
    with pytest.raises(AnaphoraError, match="added to it directly"):
        llm.generate(PROMPTS, THREE)
    assert llm.engine.num_unfinished == 1
    assert [step.request_id for step in llm.engine.step()] == ["theirs"]


def test_importing_the_package_imports_no_tensor_library():
    code = (
        "import sys, anaphora, anaphora.core, anaphora.engine.engine, anaphora.core.scheduler;"
        "anaphora.SamplingParams, anaphora.EngineConfig;"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
