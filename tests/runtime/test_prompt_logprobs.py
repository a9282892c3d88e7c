"""The executor scores prompts as the model itself does, whatever its class does between hidden states and logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from hand_plans import admit, make_executor, part, step
from tiny_llama import ids, make_tiny_llama
from transformers import LlamaForCausalLM, PreTrainedModel

import anaphora.runtime.readout as readout_module
from anaphora.core.plan import Admission, SampledToken
from anaphora.runtime.forward import PagedForward
from anaphora.sampling_params import SamplingParams

SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
SCORE = SamplingParams(temperature=0.0, prompt_logprobs=3)
CLASSES = {
    "soft cap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, final_logit_softcapping=0.5, layer_types=["full_attention"] * 2)
    ),
    "scale": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.25)),
    "experts": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    ),
}


def assert_scored(module: PreTrainedModel, tokens: list[int], entries: list[SampledToken], k: int = 3) -> None:
    with torch.inference_mode():
        logprobs = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(dim=-1)
    assert [entry.token_id for entry in entries] == tokens[1:]
    for row, token, entry in zip(logprobs, tokens[1:], entries, strict=False):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert entry.rank == 1 + int((row > row[token]).sum())
        assert [other for other, _ in entry.top_logprobs] == row.topk(k).indices.tolist()
        assert [p for _, p in entry.top_logprobs] == pytest.approx(row.topk(k).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_the_head_is_the_models_own(make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(3)
    module = make().eval()
    with torch.inference_mode():
        output = module(input_ids=torch.tensor([ids(1, 9)]), use_cache=False, output_hidden_states=True)
        before = dict(module.get_decoder().__dict__)
        logits = PagedForward(module).head(output.hidden_states[-1][0, 2:7])
    assert torch.allclose(logits, output.logits[0, 2:7], atol=1e-6)
    assert module.get_decoder().__dict__ == before


@pytest.mark.parametrize("rows_at_once", [1, 5, 256])
@pytest.mark.parametrize("chunk", [1, 16, 17, 40])
def test_a_prompt_in_chunks_is_scored_whole(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, chunk: int, rows_at_once: int
) -> None:
    monkeypatch.setattr(readout_module, "SCORED_ROWS", rows_at_once)
    executor, tokens, entries = make_executor(tiny_llama), ids(4, 40), []
    for start in range(0, 40, chunk):
        end = min(start + chunk, 40)
        blocks, admitted = ([1, 2, 3], [admit("a", tokens, SCORE)]) if start == 0 else ([], [])
        result = step(executor, part("a", start, tokens[start:end], blocks, end == 40), admitted=admitted)
        assert result.prompt_logprobs.keys() == {"a"}
        entries += result.prompt_logprobs["a"]
    assert_scored(tiny_llama, tokens, entries)
    tokens.append(result.sampled["a"].token_id)
    assert step(executor, part("a", 40, tokens[40:])).prompt_logprobs == {"a": ()}


def test_only_who_asks_is_scored_and_a_request_without_output_samples_nothing(tiny_llama: LlamaForCausalLM) -> None:
    executor, a, b = make_executor(tiny_llama), ids(5, 20), ids(6, 7)
    only = SamplingParams(max_tokens=0, prompt_logprobs=3)
    result = step(
        executor,
        part("b", 0, b, [3]),
        part("a", 0, a, [1, 2], sample=False),
        admitted=[admit("a", a, only), admit("b", b)],
    )
    assert result.sampled.keys() == {"b"}
    assert result.prompt_logprobs.keys() == {"a"}
    assert_scored(tiny_llama, a, list(result.prompt_logprobs["a"]))


def test_logits_of_a_prompt_that_are_not_finite_fail_the_request_and_no_other() -> None:
    module = make_tiny_llama()
    executor, a, b = make_executor(module), ids(7, 20), ids(8, 20)
    direct, scored = executor._forward.head, []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        scored.append(len(hidden))
        logits = direct(hidden).clone()
        if len(scored) == 1:
            logits[4, 9] = torch.inf
        return logits

    executor._forward.head = head  # type: ignore[method-assign]
    result = step(
        executor,
        part("a", 0, a, [1, 2]),
        part("b", 0, b, [3, 4]),
        admitted=[admit("a", a, SCORE), admit("b", b, SCORE)],
    )
    assert result.failed.keys() == {"a"}
    assert "prompt" in result.failed["a"]
    assert result.sampled.keys() == result.prompt_logprobs.keys() == {"b"}
    assert_scored(module, b, list(result.prompt_logprobs["b"]))
    assert not any(keys[1:3].any() for keys in executor.cache.keys)  # what it wrote is wiped


def test_end_tokens_are_not_chosen_before_min_tokens(tiny_llama: LlamaForCausalLM) -> None:
    tokens = ids(9, 12)
    plain = step(make_executor(tiny_llama), part("a", 0, tokens, [1]), admitted=[admit("a", tokens)]).sampled["a"]
    ends = frozenset({plain.token_id})
    executor = make_executor(tiny_llama)
    sampling = SamplingParams(temperature=0.0, logprobs=2, min_tokens=1, max_tokens=9)
    admission = Admission("a", tuple(tokens), 12, sampling, 0, ends)
    first = step(executor, part("a", 0, tokens, [1]), admitted=[admission]).sampled["a"]
    assert first.token_id == plain.top_logprobs[1][0]  # the second likeliest
    # Later it is free: force the situation again, by the same tokens, one position after min_tokens.
    executor = make_executor(tiny_llama)
    admission = Admission("a", tuple(tokens), 11, sampling, 0, ends)
    assert step(executor, part("a", 0, tokens, [1]), admitted=[admission]).sampled["a"].token_id == plain.token_id
