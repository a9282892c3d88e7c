"""HA3, step 6: embeddings of a prompt that is already cached, in Python. Over HTTP: tests/server/test_embeddings.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from subject import blocks, cap, gen, params, start, tiny_llama
from tiny_llama import ids

from anaphora.api.embedding import EmbeddingOutput
from anaphora.pooling_params import PoolingParams
from anaphora.sampling_params import embedding_params

P = ids(2300, 70)
Q = P[:48] + ids(2301, 22)
BOUND = 0.999999
POOLINGS = ("last", "mean", "token")


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))


def rows(output: EmbeddingOutput, pooling: str) -> list[list[float]]:
    return output.embedding if pooling == "token" else [output.embedding]  # type: ignore[list-item, return-value]


def right(prompt: Sequence[int], pooling: str) -> list[list[float]]:
    """What `transformers` gives, one forward pass without any cache."""
    module = tiny_llama()
    with torch.inference_mode():
        hidden = module.model(input_ids=torch.tensor([list(prompt)]), use_cache=False).last_hidden_state[0]
    pooled = {"last": hidden[-1:], "mean": hidden.mean(dim=0, keepdim=True), "token": hidden}[pooling]
    return torch.nn.functional.normalize(pooled, dim=-1).tolist()


@pytest.mark.parametrize("tokens_per_step", [512, 7, 16, 17])
@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_cached_prompt_has_the_embedding_of_a_cold_one(
    pooling: str, fast_forward: bool, tokens_per_step: int
) -> None:
    llm = start(max_num_batched_tokens=tokens_per_step, fast_forward=fast_forward)
    hits = {"last": [0, 64, 64, 48, 64]}.get(pooling, [0] * 5)
    for prompt, hit in zip((P, P, P, Q, P), hits, strict=True):
        before = llm.stats().counters
        (output,) = llm.embed(prompt, pooling)
        assert output.num_cached_tokens == hit
        got, expected = rows(output, pooling), right(prompt, pooling)
        assert len(got) == (70 if pooling == "token" else 1)
        for row, reference in zip(got, expected, strict=True):
            assert cosine(row, reference) > BOUND
            assert math.fsum(x * x for x in row) == pytest.approx(1.0, abs=1e-6)
        delta = llm.stats().counters.delta(before)
        looked_up = (70, hit, 0) if pooling == "last" else (0, 0, 70)
        assert (delta.num_queried_tokens, delta.num_hit_tokens, delta.num_bypassed_tokens) == looked_up
        assert (delta.num_computed_prompt_tokens, delta.num_generated_tokens) == (70 - hit, 0)
    assert gen(llm, P).num_cached_tokens == cap(70)  # it may write the cache
    assert blocks(llm.stats()).live == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_length_around_a_block_border(length: int, pooling: str) -> None:
    llm, prompt = start(), P[:length]
    gen(llm, prompt)
    for _ in range(2):
        got = rows(llm.embed(prompt, pooling)[0], pooling)
        assert len(got) == (length if pooling == "token" else 1)
        assert all(cosine(a, b) > BOUND for a, b in zip(got, right(prompt, pooling), strict=True))


def test_in_one_batch_with_others_of_every_kind() -> None:
    llm = start(max_num_batched_tokens=64)
    alone = gen(start(), Q, 5)
    gen(llm, P)
    asked = [embedding_params(PoolingParams(pooling)) for pooling in POOLINGS]
    *pooled, generated = llm.generate([P, P, Q, Q], [*asked, params(5)])
    assert [output.num_cached_tokens for output in pooled] == [64, 0, 0]
    assert generated.outputs[0].token_ids == alone.outputs[0].token_ids
    for output, prompt, pooling in zip(pooled, (P, P, Q), POOLINGS, strict=True):
        assert output.embedding is not None
        got = output.embedding.rows()
        assert all(cosine(a, b) > BOUND for a, b in zip(got, right(prompt, pooling), strict=True))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_after_a_preemption_every_position_is_pooled_once(pooling: str) -> None:
    # The output of the first needs a third block, and the pool of 8 is full: the other gives way within its prompt.
    llm = start(num_blocks=8, max_num_batched_tokens=4, long_prefill_token_threshold=2)
    prompts = [ids(2330, 30), ids(2331, 90)]
    asked = [params(20), embedding_params(PoolingParams(pooling))]
    outputs = llm.generate(prompts, asked)
    assert llm.stats().counters.num_preemptions > 0  # GUARD
    assert outputs[1].embedding is not None
    got = outputs[1].embedding.rows()
    assert len(got) == (90 if pooling == "token" else 1)
    assert all(cosine(a, b) > BOUND for a, b in zip(got, right(prompts[1], pooling), strict=True))
    assert blocks(llm.stats()).live == 0


def test_without_scaling_the_rows_are_the_hidden_states_themselves() -> None:
    with torch.inference_mode():
        hidden = tiny_llama().model(input_ids=torch.tensor([P]), use_cache=False).last_hidden_state[0]
    (output,) = start().embed(P, "token", normalize=False)
    assert torch.allclose(torch.tensor(output.embedding), hidden, atol=1e-4)
