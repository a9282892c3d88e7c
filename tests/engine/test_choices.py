"""Claims: n sequences of one prompt are n requests with seeds in a row, added together, and one output."""

from __future__ import annotations

import pytest
from engine_fakes import ByteTokenizer, make_engine, scrambled

from anaphora.api.llm import LLM
from anaphora.errors import InvalidParameterError
from anaphora.sampling_params import SamplingParams


class CountingTokenizer(ByteTokenizer):
    chat_template = "a template"

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text, *, add_special_tokens=True):
        self.encoded.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, messages, **options):
        return "<bos>" + messages[0]["content"]


def make_llm(**options):
    tokenizer = CountingTokenizer()
    engine, executor, _ = make_engine(tokenizer=tokenizer, **options)
    return LLM.from_engine(engine), executor, tokenizer


def test_choice_i_has_seed_plus_i_and_one_sequence():
    params = SamplingParams(n=3, seed=2**64 - 2, prompt_logprobs=1, max_tokens=4)
    assert [choice.seed for choice in params.choices()] == [2**64 - 2, 2**64 - 1, 0]
    assert {(choice.n, choice.max_tokens) for choice in params.choices()} == {(1, 4)}
    assert [choice.prompt_logprobs for choice in params.choices()] == [1, None, None]
    one = SamplingParams()
    assert one.choices() == [one]
    assert [choice.seed for choice in SamplingParams(n=2).choices()] == [None, None]


def test_a_text_prompt_is_tokenised_once_and_comes_back():
    llm, executor, tokenizer = make_llm()
    (output,) = llm.generate("hello", SamplingParams(n=3, seed=7, max_tokens=2))
    assert tokenizer.encoded == ["hello"]
    assert (output.prompt, output.prompt_token_ids) == ("hello", list(b"hello"))
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert list(executor.seeds.values()) == [7, 8, 9]


def test_choices_without_a_seed_draw_one_each():
    llm, executor, _ = make_llm()
    llm.generate("hello", SamplingParams(n=3, max_tokens=1))
    assert len(set(executor.seeds.values())) == 3


def test_a_chat_has_choices_and_its_special_tokens_once():
    llm, _, tokenizer = make_llm()
    (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(n=2, max_tokens=2))
    assert tokenizer.encoded == ["<bos>hi"]
    assert output.prompt_token_ids == list(b"<bos>hi")
    assert len(output.outputs) == 2


def test_one_choice_that_fails_says_so_and_the_others_go_on():
    llm, executor, _ = make_llm()
    executor.failed = {"llm-1"}  # the second request
    (output,) = llm.generate([1, 2, 3], SamplingParams(n=3, max_tokens=3))
    assert [choice.finish_reason for choice in output.outputs] == ["length", "error", "length"]
    assert "non-finite" in output.error
    assert llm.engine.num_unfinished == 0


def test_a_preempted_choice_is_counted_in_the_whole():
    llm, _, _ = make_llm(num_blocks=5)
    (output,) = llm.generate([1, 2, 3, 4, 5], SamplingParams(n=3, max_tokens=9))
    tokens = [1, 2, 3, 4, 5]
    for _ in range(9):
        tokens.append(scrambled(tokens))
    assert [choice.token_ids for choice in output.outputs] == [tokens[5:]] * 3
    assert output.metrics.num_preemptions == llm.stats().counters.num_preemptions > 0


def test_the_step_engine_refuses_more_than_one_and_says_what_to_do():
    engine, _, _ = make_engine()
    with pytest.raises(InvalidParameterError, match=r"n=2.*choices\(\)"):
        engine.add_request("a", [1], SamplingParams(n=2))
    assert not engine.has_unfinished


@pytest.mark.parametrize("options", [{"n": 0}, {"n": -1}, {"n": True}, {"n": 2.0}, {"n": None}])
def test_a_wrong_n_is_refused(options):
    with pytest.raises(InvalidParameterError, match=r"^n must be an integer >= 1"):
        SamplingParams(**options)


def test_scoring_alone_has_one_sequence():
    with pytest.raises(InvalidParameterError, match=r"^n must be 1"):
        SamplingParams(n=2, max_tokens=0, prompt_logprobs=0)


def test_a_refused_prompt_takes_the_choices_before_it_back():
    llm, _, _ = make_llm()
    with pytest.raises(InvalidParameterError, match="a prompt must be"):
        llm.generate([[1], 5], [SamplingParams(n=3)] * 2)
    assert llm.engine.num_unfinished == 0
