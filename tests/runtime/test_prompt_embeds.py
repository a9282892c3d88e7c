"""Rows of embeddings in place of tokens: the model's own results, a key that is their content, and what is refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_llama import ids, make_tiny_llama

from anaphora import LLM, SamplingParams
from anaphora.core import check_scheduler
from anaphora.errors import EmptyPromptError, InvalidParameterError, InvalidTokenError, PromptTooLongError

HIDDEN, BLOCK = 64, 8
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
TOLERANCE = 1e-3
APART = 100 * TOLERANCE


def rows(seed: int, count: int) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed)) * 0.3


@pytest.fixture(scope="module")
def module() -> Any:
    torch.set_num_threads(1)
    return make_tiny_llama()


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_tiny_llama()


@pytest.fixture
def llm(module: Any) -> LLM:
    return LLM(module, num_blocks=128, block_size=BLOCK)


def right(reference: Any, prompt: dict[str, Any], outputs: list[int]) -> torch.Tensor:
    """[positions, vocab] of one plain forward over the rows, tokens and outputs."""
    embed, given = reference.get_input_embeddings(), prompt["prompt_embeds"]
    mask = torch.tensor(prompt.get("embeds_mask", [True] * len(given)))
    inputs = embed(torch.tensor(prompt.get("prompt_token_ids", [0] * len(mask)))).detach().clone()
    inputs[mask] = given.float()
    inputs = torch.cat([inputs, embed(torch.tensor(outputs, dtype=torch.int64))])
    with torch.inference_mode():
        return torch.log_softmax(reference(inputs_embeds=inputs.unsqueeze(0), use_cache=False).logits[0], dim=-1)


def deviation(reference: Any, prompt: dict[str, Any], output: Any) -> float:
    assert output.error is None, output.error
    tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
    scores = right(reference, prompt, tokens)[len(output.prompt_token_ids) - 1 :]
    return max(
        abs(entry[token].logprob - float(scores[i, token]))
        for i, (token, entry) in enumerate(zip(tokens, entries, strict=True))
    )


def ask(llm: LLM, prompt: Any, params: SamplingParams = PARAMS, **options: Any) -> Any:
    (output,) = llm.generate(prompt, params, **options)
    return output


def mixed(seed: int, mask: list[bool]) -> dict[str, Any]:
    return {"prompt_embeds": rows(seed, sum(mask)), "prompt_token_ids": ids(seed, len(mask)), "embeds_mask": mask}


MASKS = {
    "all": [True] * 21,
    "first": [True] * 3 + [False] * 20,
    "last": [False] * 20 + [True] * 3,
    "scattered": [bool(i % 3) for i in range(30)],
    "a block of tokens between": [True] * 8 + [False] * 8 + [True] * 8,
}


@pytest.mark.parametrize("budget", [512, 5])
@pytest.mark.parametrize("name", MASKS)
def test_cold_and_warm_outputs_are_the_models_own(module: Any, reference: Any, name: str, budget: int) -> None:
    llm, prompt = LLM(module, num_blocks=128, block_size=BLOCK, max_num_batched_tokens=budget), mixed(1, MASKS[name])
    cold, warm = ask(llm, prompt), ask(llm, prompt)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (len(MASKS[name]) - 1) // BLOCK * BLOCK)
    assert deviation(reference, prompt, cold) < TOLERANCE
    assert deviation(reference, prompt, warm) < TOLERANCE
    assert deviation(reference, mixed(2, MASKS[name]), cold) > APART  # the rows matter
    assert llm.engine._executor.features.num_held == 0


def test_rows_that_are_a_models_own_embeddings_give_what_the_tokens_give(llm: LLM, module: Any) -> None:
    tokens = ids(3, 25)
    by_row = ask(llm, {"prompt_embeds": module.get_input_embeddings()(torch.tensor(tokens)).detach()})
    by_token = ask(llm, tokens)
    assert by_token.num_cached_tokens == 0, "equal K/V, and yet not one identity: what is not compared is not shared"
    assert by_row.outputs[0].token_ids == by_token.outputs[0].token_ids


def test_one_other_row_misses_from_its_own_block_on(llm: LLM) -> None:
    first = rows(1, 40)
    ask(llm, {"prompt_embeds": first})
    for place in (0, 7, 8, 23, 39):
        other = first.clone()
        other[place, 5] += 1e-3
        assert ask(llm, {"prompt_embeds": other}).num_cached_tokens == min(place // BLOCK * BLOCK, 32)
        assert ask(llm, {"prompt_embeds": first}).num_cached_tokens == 32


def test_which_positions_are_rows_is_of_the_key(llm: LLM, reference: Any) -> None:
    """The same rows and tokens in the same order, at other places."""
    masks = [list(mask) for mask in itertools.product([True, False], repeat=4) if sum(mask) == 2]
    tokens = ids(4, 20)
    for mask in masks:
        prompt = {
            "prompt_embeds": rows(1, 2),
            "prompt_token_ids": [0] * 4 + tokens,
            "embeds_mask": mask + [False] * 20,
        }
        output = ask(llm, prompt)
        assert output.num_cached_tokens == 0
        assert deviation(reference, prompt, output) < TOLERANCE


def test_the_tokens_under_rows_mean_nothing(llm: LLM) -> None:
    prompt = mixed(1, MASKS["scattered"])
    ask(llm, prompt)
    under = [
        token if not is_row else 7
        for token, is_row in zip(prompt["prompt_token_ids"], prompt["embeds_mask"], strict=True)
    ]
    assert ask(llm, prompt | {"prompt_token_ids": under}).num_cached_tokens == 24


def test_precisions_that_are_one_number_are_one_row(llm: LLM) -> None:
    half = rows(1, 17).to(torch.bfloat16)
    ask(llm, {"prompt_embeds": half})
    assert ask(llm, {"prompt_embeds": half.float()}).num_cached_tokens == 16
    assert ask(llm, {"prompt_embeds": safetensors.torch.save({"prompt_embeds": half})}).num_cached_tokens == 16


def test_rows_tokens_and_salts_in_one_batch(module: Any, reference: Any) -> None:
    llm = LLM(module, num_blocks=40, block_size=BLOCK, max_num_batched_tokens=40, max_num_seqs=6)
    draw, engine, prompts, outputs = random.Random(5), llm.engine, {}, {}
    stems = [mixed(seed, [draw.random() < 0.5 for _ in range(24)]) for seed in range(3)]
    todo = []
    for number in range(20):
        stem, length = draw.choice(stems), draw.randrange(1, 24)
        mask = stem["embeds_mask"][:length]
        if not sum(mask):
            continue
        prompts[f"r{number}"] = {
            "prompt_embeds": stem["prompt_embeds"][: sum(mask)],
            "prompt_token_ids": stem["prompt_token_ids"][:length],
            "embeds_mask": mask,
        }
        todo.append((f"r{number}", draw.choice([None, "a"])))
    while todo or engine.has_unfinished:
        if todo and draw.random() < 0.7:
            request_id, salt = todo.pop(0)
            params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
            engine.add_request(request_id, prompts[request_id], params, cache_salt=salt)
        outputs |= {step.request_id: step.output for step in engine.step() if step.output is not None}
        check_scheduler(engine._scheduler)
    assert engine.stats().counters.num_hit_tokens > 0
    assert all(deviation(reference, prompts[name], output) < TOLERANCE for name, output in outputs.items())
    assert len(outputs) == len(prompts) and engine._executor.features.num_held == 0


def test_a_prompt_is_scored_where_it_has_tokens(llm: LLM, reference: Any) -> None:
    prompt = mixed(1, MASKS["scattered"])
    output = ask(llm, prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    scores = right(reference, prompt, [])
    assert output.prompt_logprobs[0] is None
    for place in range(1, 30):
        entry, token = output.prompt_logprobs[place], prompt["prompt_token_ids"][place]
        if prompt["embeds_mask"][place]:
            assert entry is None
        else:
            assert abs(entry[token].logprob - float(scores[place - 1, token])) < TOLERANCE


NAN = rows(1, 3)
NAN[1, 2] = float("nan")


@pytest.mark.parametrize(
    ("prompt", "error", "said"),
    [
        ({"prompt_embeds": [[0.0] * HIDDEN]}, InvalidParameterError, "must be a dense tensor, got list"),
        ({"prompt_embeds": rows(1, 2)[:, :-1]}, InvalidParameterError, r"shape \[rows, 64\], got \[2, 63\]"),
        ({"prompt_embeds": rows(1, 2)[0]}, InvalidParameterError, r"shape \[rows, 64\], got \[64\]"),
        ({"prompt_embeds": rows(1, 2).long()}, InvalidParameterError, "float32, bfloat16 or float16, got torch.int64"),
        ({"prompt_embeds": rows(1, 2).double()}, InvalidParameterError, "got torch.float64"),
        ({"prompt_embeds": NAN}, InvalidParameterError, "a number in row 1 that is not finite"),
        ({"prompt_embeds": rows(1, 0)}, EmptyPromptError, "no rows"),
        ({"prompt_embeds": rows(1, 5000)}, PromptTooLongError, "5000 positions"),
        ({"prompt_embeds": b"\x80\x04pickle"}, InvalidParameterError, "no safetensors file"),
        ({"prompt_embeds": rows(1, 2), "embeds_mask": [True, True]}, InvalidParameterError, "belong together"),
        (
            {"prompt_embeds": rows(1, 2), "prompt_token_ids": [8], "embeds_mask": [True]},
            InvalidParameterError,
            "1 rows",
        ),
        (
            {"prompt_embeds": rows(1, 1), "prompt_token_ids": [8], "embeds_mask": [1]},
            InvalidParameterError,
            "a list of True",
        ),
        (
            {"prompt_embeds": rows(1, 1), "prompt_token_ids": [8, 9], "embeds_mask": [True]},
            InvalidParameterError,
            "has 1 entries, prompt_token_ids 2",
        ),
        (
            {"prompt_embeds": rows(1, 1), "prompt_token_ids": [8, 384], "embeds_mask": [True, False]},
            InvalidTokenError,
            "token id 384",
        ),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ask(llm, prompt)
    assert not llm.engine.has_unfinished and llm.engine._executor.features.num_held == 0


def test_a_penalty_on_prompt_tokens_needs_tokens(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="repetition_penalty counts the tokens"):
        ask(llm, {"prompt_embeds": rows(1, 3)}, SamplingParams(repetition_penalty=1.1))


def test_a_prompt_that_was_read_for_other_blocks_is_refused(module: Any, llm: LLM) -> None:
    """Its keys would enter later blocks than the rows that they are about: other rows would be found."""
    small, large = llm, LLM(module, num_blocks=64, block_size=2 * BLOCK)
    mask, tokens = [False] * 12 + [True] * 9, ids(1, 21)
    prompts = [
        small.engine.read_prompt({"prompt_embeds": rows(seed, 9), "prompt_token_ids": tokens, "embeds_mask": mask})
        for seed in (1, 2)
    ]
    assert [key.block_index for key in prompts[0].extra_keys] == [1, 2]
    for prompt in prompts:
        with pytest.raises(
            InvalidParameterError, match="read for blocks of 8 tokens, and this engine has blocks of 16"
        ):
            large.engine.add_request("a", prompt, PARAMS)
        small.engine.add_request("a", prompt, PARAMS)
        while small.engine.has_unfinished:
            outputs = small.engine.step()
        assert outputs[-1].output.num_cached_tokens == (8 if prompt is prompts[1] else 0)


def test_the_callers_tensor_may_change_afterwards(llm: LLM, reference: Any) -> None:
    given = rows(1, 9)
    prompt = {"prompt_embeds": given.clone()}
    llm.engine.add_request("a", {"prompt_embeds": given}, PARAMS)
    given.zero_()
    while llm.engine.has_unfinished:
        outputs = llm.engine.step()
    assert deviation(reference, prompt, outputs[-1].output) < TOLERANCE
