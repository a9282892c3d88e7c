"""Claim: a structured output is what its schema or expression says, the same however its request was scheduled."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
import time
from typing import Any

import pytest
import torch
from tiny_llama import make_tiny_llama
from tiny_tokenizer import END, make_tiny_tokenizer
from transformers import LlamaForCausalLM

from anaphora import LLM, SamplingParams
from anaphora.engine.outputs import RequestOutput
from anaphora.errors import InvalidParameterError
from anaphora.runtime.grammar import GrammarError, GrammarState
from anaphora.runtime.grammar_llguidance import MAX_KEPT, LLGuidanceGrammars
from anaphora.sampling_params import MAX_GRAMMAR_CHARS, MAX_SCHEMA_DEPTH

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
JSON = SamplingParams(json_schema=SCHEMA, max_tokens=120, seed=1)
WORD = SamplingParams(regex="[a-z]{3}(-[0-9]{2}){1,4}", max_tokens=40, seed=1)
PROMPTS = ["Tell me about the pet, please.", "Tell me about the other one.", "x", "And now?"]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_tiny_llama()


def start(model: LlamaForCausalLM, **options: Any) -> LLM:
    options = {"block_size": 4, "num_blocks": 256, "tokenizer": make_tiny_tokenizer()} | options
    return LLM(model, dtype="float32", num_threads=1, **options)


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "kind", "ages"]
    assert re.fullmatch("[A-Z][a-z]{1,5}", value["name"])
    assert value["kind"] in ("cat", "dog")
    assert len(value["ages"]) <= 3
    assert all(type(age) is int and 0 <= age <= 99 for age in value["ages"])


def results(outputs: list[RequestOutput]) -> list[tuple[list[int], str | None, str | None]]:
    return [(choice.token_ids, choice.finish_reason, o.error) for o in outputs for choice in o.outputs]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.9}], ids=str)
def test_outputs_are_what_they_should_be(model: LlamaForCausalLM, options: dict[str, float]) -> None:
    llm = start(model)
    for seed in range(6):
        (output,) = llm.generate("The pet:", dataclasses.replace(JSON, seed=seed, **options))
        choice = output.outputs[0]
        assert (choice.finish_reason, choice.token_ids[-1]) == ("stop", END)
        check_json(choice.text)
        (output,) = llm.generate("The word:", dataclasses.replace(WORD, seed=seed, **options))
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(WORD.regex or "", output.outputs[0].text)


def test_neither_the_batch_nor_preemption_nor_the_cache_changes_an_output(model: LlamaForCausalLM) -> None:
    wanted = [JSON, WORD, SamplingParams(max_tokens=30, seed=1, ignore_eos=True), dataclasses.replace(JSON, seed=2)]
    solo = start(model, enable_prefix_caching=False)
    alone = [solo.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, wanted, strict=True)]
    check_json(alone[0].outputs[0].text)
    check_json(alone[3].outputs[0].text)
    for options in ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 26}):
        llm = start(model, **options)
        for _ in range(2):
            assert results(llm.generate(PROMPTS, wanted)) == results(alone)
        assert "num_blocks" not in options or llm.stats().counters.num_preemptions > 0  # GUARD
        assert llm.stats().gauges.num_live_blocks == 0


def test_each_of_n_choices_has_its_own_place_in_the_grammar(model: LlamaForCausalLM) -> None:
    llm = start(model)
    (output,) = llm.generate("x", dataclasses.replace(JSON, n=4))
    texts = [choice.text for choice in output.outputs]
    assert len(set(texts)) > 1
    for index, text in enumerate(texts):
        check_json(text)
        assert llm.generate("x", dataclasses.replace(JSON, seed=1 + index))[0].outputs[0].text == text


def test_logprobs_are_those_of_the_model_not_of_the_grammar(model: LlamaForCausalLM) -> None:
    (output,) = start(model).generate("x", dataclasses.replace(WORD, temperature=0.0, logprobs=1))
    choice = output.outputs[0]
    assert choice.logprobs is not None
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([output.prompt_token_ids + choice.token_ids])).logits[0]
    logprobs = logits.log_softmax(dim=-1)[len(output.prompt_token_ids) - 1 :]
    ranks = [entry[token].rank for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert max(rank or 0 for rank in ranks) > 1  # GUARD: the grammar forced something
    for row, token, entry in zip(logprobs, choice.token_ids, choice.logprobs, strict=False):
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)


def test_max_tokens_cuts_an_output_short(model: LlamaForCausalLM) -> None:
    (output,) = start(model).generate("x", dataclasses.replace(JSON, max_tokens=5))
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text.replace(" ", "").startswith('{"n')


WRONG = {
    "schema that is no JSON": ({"json_schema": "{"}, "^json_schema is no JSON"),
    "schema that is no object": ({"json_schema": "[1]"}, "^json_schema must be a JSON object"),
    "empty schema text": ({"json_schema": ""}, "^json_schema must be a non-empty string"),
    "mapping that is no JSON": ({"json_schema": {"enum": {1}}}, "^json_schema is no JSON"),
    "number": ({"json_schema": 5}, "^json_schema must be a non-empty string"),
    "bytes": ({"regex": b"a"}, "^regex must be a non-empty string"),
    "empty regex": ({"regex": ""}, "^regex must be a non-empty string"),
    "long regex": ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, f"^regex has {MAX_GRAMMAR_CHARS + 1} characters"),
    "deep schema": (
        {"json_schema": '{"items":' * MAX_SCHEMA_DEPTH + "{}" + "}" * MAX_SCHEMA_DEPTH},
        f"^json_schema is nested more than {MAX_SCHEMA_DEPTH} levels",
    ),
    "very deep schema": ({"json_schema": "[" * 60_000}, "^json_schema is no JSON"),
    "both": ({"json_schema": "{}", "regex": "a"}, "^regex and json_schema"),
    "min_tokens": ({"regex": "a", "min_tokens": 1}, "^min_tokens goes against regex"),
    "ignore_eos": ({"json_schema": {}, "ignore_eos": True}, "^ignore_eos goes against json_schema"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parameters_are_refused_by_name(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(InvalidParameterError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_a_schema_of_the_greatest_depth_is_accepted() -> None:
    depth = MAX_SCHEMA_DEPTH - 1
    SamplingParams(json_schema='{"items":' * depth + "{}" + "}" * depth)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "("}, r"^regex cannot be followed: .*unclosed group"),
        ({"regex": "(?=a)b"}, r"^regex cannot be followed: .*look-ahead"),
        ({"json_schema": {"type": "foo"}}, r"^json_schema cannot be followed: .*foo"),
        ({"json_schema": {"not": {"type": "string"}}}, r"^json_schema cannot be followed: .*not"),
        ({"json_schema": {"$ref": "http://example.com/x"}}, r"^json_schema cannot be followed"),
        ({"json_schema": {"$ref": "#"}}, r"^json_schema describes no output: .*cannot be followed"),
        ({"regex": "[^\\s\\S]"}, r"^regex (describes no output|cannot be followed): "),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 2}}, r"^json_schema cannot be followed: .*5"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_before_anything_runs(
    model: LlamaForCausalLM, options: dict[str, Any], message: str
) -> None:
    llm = start(model)
    with pytest.raises(InvalidParameterError, match=message) as refusal:
        llm.generate(["x", "y"], [SamplingParams(), SamplingParams(**options)])
    assert len(str(refusal.value)) < 500
    assert llm.engine.num_unfinished == 0
    assert llm.generate("x", WORD)[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "regex", ["((a{1,1000}){1,1000}){1,1000}", "(a|aa)+(b|a)*(a?){999}", "|".join(f"{i}x*{i}" for i in range(3000))]
)
def test_hostile_expressions_cost_a_bounded_time(model: LlamaForCausalLM, regex: str) -> None:
    llm = start(model)
    begin = time.monotonic()
    with contextlib.suppress(InvalidParameterError):
        llm.generate("x", SamplingParams(regex=regex, max_tokens=40))
    assert time.monotonic() - begin < 30
    assert llm.generate("x", WORD)[0].outputs[0].finish_reason == "stop"


def test_a_missing_package_is_named_with_what_installs_it(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(model)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidParameterError, match=r"^regex needs the llguidance package.*: pip install llguidance$"):
        llm.generate("x", WORD)
    assert llm.generate("x", SamplingParams(max_tokens=2))[0].error is None


def test_structure_needs_a_tokenizer_and_an_end_token(model: LlamaForCausalLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"^json_schema needs a tokenizer"):
        start(model, tokenizer=None).generate([[1, 2]], JSON)
    grammars = LLGuidanceGrammars(make_tiny_tokenizer(), 384, ())
    with pytest.raises(InvalidParameterError, match=r"^regex needs a model with an end token"):
        grammars.check(WORD)


def test_only_tokens_of_the_tokenizer_are_allowed_and_masks_have_the_size_of_the_vocabulary() -> None:
    grammars = LLGuidanceGrammars(make_tiny_tokenizer(), 384, {END})
    matcher = grammars.matcher(SamplingParams(regex="(?s:.)*"))
    allowed = matcher.allowed()
    assert allowed.shape == (384,)
    assert allowed[END]
    assert not allowed[END + 1 :].any()


def test_compiled_grammars_are_kept_up_to_a_number_and_never_changed_by_a_request() -> None:
    grammars, tokenizer = LLGuidanceGrammars(make_tiny_tokenizer(), 384, {END}), make_tiny_tokenizer()
    first = grammars.matcher(WORD)
    first.accept(tokenizer.encode("abc"))
    (dash,) = tokenizer.encode("-")
    assert first.allowed().nonzero()[:, 0].tolist() == [dash]
    assert int(grammars.matcher(WORD).allowed().sum()) == 26
    for number in range(MAX_KEPT):
        grammars.check(SamplingParams(regex=f"a{{{number + 1}}}"))
    assert len(grammars._compiled) == MAX_KEPT
    assert ("regex", WORD.regex) not in grammars._compiled


def test_an_output_that_leaves_its_grammar_ends_with_an_error_and_takes_nobody_with_it(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(model)
    calls = 0
    direct = GrammarState.allowed

    def allowed(state: GrammarState) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:  # the first of two with one prompt: the other one reads blocks that it writes
            raise GrammarError("a limit")
        return direct(state)

    monkeypatch.setattr(GrammarState, "allowed", allowed)
    first, second = llm.generate([PROMPTS[0]] * 2, WORD)
    assert (first.outputs[0].finish_reason, first.error) == ("error", "a limit")
    assert (second.outputs[0].finish_reason, second.error) == ("stop", None)
    assert second.num_cached_tokens > 0  # GUARD
    assert llm.stats().gauges.num_live_blocks == 0


def test_a_token_outside_the_grammar_is_an_error_for_good() -> None:
    tokenizer = make_tiny_tokenizer()
    state = GrammarState(LLGuidanceGrammars(tokenizer, 384, {END}).matcher(WORD), 3)
    state.extend(0, [1, 2, 3, *tokenizer.encode("ab")])  # the prompt is no part of the output
    assert int(state.allowed().sum()) == 26
    state.extend(4, tokenizer.encode("b"))  # known
    state.extend(5, tokenizer.encode("-"))
    for _ in range(2):
        with pytest.raises(GrammarError, match="left its grammar"):
            state.allowed()
        state.extend(6, tokenizer.encode("a"))
