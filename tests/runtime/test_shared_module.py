"""Engines that share a module do not disturb each other, and one request's odd wishes do not end another one."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_llama import ids, make_tiny_llama

from anaphora import LLM, SamplingParams
from anaphora.errors import AnaphoraError, DuplicateRequestError, InvalidParameterError

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_two_engines_on_one_module_in_two_threads(fast_forward: bool) -> None:
    module = make_tiny_llama()
    prompts = [ids(seed, 40) for seed in range(12)]
    engines = [LLM(module, num_blocks=64, num_threads=1, fast_forward=fast_forward) for _ in range(2)]
    expected = [output.outputs[0].token_ids for output in engines[0].generate(prompts, GREEDY)]
    implementation = module.config._attn_implementation

    def work(llm: LLM) -> list[list[int]]:
        return [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, engines)) == [expected, expected]
    assert module.config._attn_implementation == implementation


def test_an_end_token_outside_the_vocabulary_cannot_be_chosen_and_harms_nobody() -> None:
    module = make_tiny_llama()
    module.generation_config.eos_token_id = [384, -1]
    llm = LLM(module, num_blocks=64)
    outputs = llm.generate([ids(1, 10), ids(2, 10)], [SamplingParams(max_tokens=4, min_tokens=2), GREEDY])
    assert [output.error for output in outputs] == [None, None]


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_an_extreme_penalty_on_extreme_logits_stays_in_the_vocabulary(penalty: float) -> None:
    module = make_tiny_llama()
    with torch.no_grad():
        module.lm_head.weight *= 5e37  # finite, and beyond float32 when divided by the penalty
    llm = LLM(module, num_blocks=64)
    odd = SamplingParams(max_tokens=6, repetition_penalty=penalty, seed=1)
    for output in llm.generate([ids(1, 10), ids(2, 10)], [odd, GREEDY]):
        assert output.error is None
        assert all(token < 384 for token in output.outputs[0].token_ids)
    with pytest.raises(InvalidParameterError):
        SamplingParams(repetition_penalty=1e-40)


def test_a_model_that_masks_tokens_with_the_lowest_number_is_served() -> None:
    module = make_tiny_llama()
    lowest = torch.finfo(torch.float32).min
    module.lm_head.register_forward_hook(
        lambda _, __, logits: logits.clone().index_fill_(-1, torch.arange(300, 384), lowest)
    )
    (output,) = LLM(module, num_blocks=64).generate([ids(1, 10)], GREEDY)
    assert output.error is None
    assert all(token < 300 for token in output.outputs[0].token_ids)


def test_a_stream_whose_request_was_ended_elsewhere_says_so() -> None:
    llm = LLM(make_tiny_llama(), num_blocks=64)
    stream = llm.stream(ids(1, 10), GREEDY)
    llm.engine.abort(next(stream).request_id)
    with pytest.raises(AnaphoraError, match="one place only"):
        next(stream)


def test_a_request_that_was_added_by_hand_survives_a_clash_of_ids() -> None:
    llm = LLM(make_tiny_llama(), num_blocks=64)
    llm.engine.add_request("llm-0", ids(1, 10), GREEDY)
    with pytest.raises(DuplicateRequestError):
        llm.generate([ids(2, 10)], GREEDY)
    assert llm.engine.num_unfinished == 1


def test_a_served_module_can_be_copied_and_pickled() -> None:
    module = make_tiny_llama()
    (expected,) = LLM(module, num_blocks=64).generate([ids(1, 10)], GREEDY)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert vars(twin)["_anaphora_lock"] is not vars(module)["_anaphora_lock"]
        (output,) = LLM(twin, num_blocks=64).generate([ids(1, 10)], GREEDY)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
