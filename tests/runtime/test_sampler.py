"""Tokens are chosen by the documented order of operations; each filter is compared with a plain formula."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import pytest
import torch

import anaphora.runtime.sampler as sampler_module
from anaphora.runtime.sampler import SamplingRow, TokenCounts, sample, uniform
from anaphora.sampling_params import SamplingParams


def row(params: SamplingParams, position: int = 0, seed: int = 0, counts: TokenCounts | None = None) -> SamplingRow:
    return SamplingRow(params, seed, position, counts)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(top_k=3, min_p=0.1), SamplingParams(top_p=0.9)]
)
def test_banned_tokens_are_not_chosen_while_there_is_another_one(params: SamplingParams) -> None:
    params = dataclasses.replace(params, logprobs=4)
    logits = logits_of([0.4, 0.3, 0.2, 0.1]).expand(3, -1)
    rows = [SamplingRow(params, 1, 0, banned=banned) for banned in (frozenset({0, 1, 3}), frozenset({0, 1, 2, 3}), ())]
    one, none, free = sample(logits, rows)
    assert one.token_id == 2
    assert 0 <= none.token_id < 4
    assert one.logprob == pytest.approx(math.log(0.2))  # raw: as if nothing were banned
    assert one.top_logprobs == none.top_logprobs == free.top_logprobs


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().clamp(min=-1e4).float()


def draws(probabilities: list[float], n: int = 2000, **params: float) -> Counter[int]:
    """How often each token is drawn over n positions."""
    logits = logits_of(probabilities).expand(n, -1)
    rows = [row(SamplingParams(**params), position) for position in range(n)]
    return Counter(token.token_id for token in sample(logits, rows))


def naive_choice(logits: list[float], params: SamplingParams, u: float) -> int:
    """Temperature, min-p, top-k, top-p and inverse CDF, one token after another."""
    highest = max(logits)
    weights = {token: math.exp((x - highest) / params.temperature) for token, x in enumerate(logits)}
    order = sorted(weights, key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= params.min_p]  # the largest weight is 1
    order = order[: params.top_k or len(order)]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= params.top_p * total and params.top_p < 1.0:
            break
        kept.append(token)
        mass += weights[token]
    target, cumulative = u * sum(weights[token] for token in kept), 0.0
    for token in sorted(kept):
        cumulative += weights[token]
        if cumulative > target:
            return token
    raise AssertionError("unreachable")


def test_the_uniform_number_is_a_hash_of_seed_and_position() -> None:
    """The values are a format: a change would change every seeded answer."""
    assert uniform(0, 0) == 0.0564663990004608
    assert uniform(0, 1) != uniform(1, 0)
    assert uniform(2**64 + 3, 7) == uniform(3, 7)
    numbers = [uniform(seed, position) for seed in range(20) for position in range(100)]
    assert len(set(numbers)) == 2000
    assert min(numbers) >= 0.0
    assert max(numbers) < 1.0
    assert abs(sum(numbers) / 2000 - 0.5) < 0.02


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 3.0, 1.0]])
    result = sample(logits, [row(SamplingParams(temperature=0.0))] * 2)
    assert [token.token_id for token in result] == [1, 0]
    assert result[0].logprob is None and result[0].rank is None and result[0].top_logprobs == ()


def test_the_draw_is_the_inverse_cdf_in_token_order(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of([0.25, 0.0, 0.5, 0.25]).unsqueeze(0)
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, position: 0.25)
    assert sample(torch.zeros(1, 4), [row(SamplingParams())])[0].token_id == 1  # [0, 1/4) is token 0
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, position: 0.0)
    assert sample(torch.tensor([[-1e30, 0.0, 0.0]]), [row(SamplingParams())])[0].token_id == 1
    expected = {0.0: 0, 0.2499: 0, 0.2501: 2, 0.7499: 2, 0.7501: 3, 1.0 - 2.0**-53: 3}
    for u, token in expected.items():
        monkeypatch.setattr(sampler_module, "uniform", lambda seed, position, u=u: u)
        assert sample(logits, [row(SamplingParams())])[0].token_id == token


def test_draws_follow_the_distribution() -> None:
    counts = draws([0.5, 0.25, 0.125, 0.125], n=4000)
    assert set(counts) == {0, 1, 2, 3}
    for token, probability in enumerate([0.5, 0.25, 0.125, 0.125]):
        assert abs(counts[token] / 4000 - probability) < 0.03


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 3}, {0, 1, 2}),  # 0 and 3 tie: the lower id stays
        ({"top_p": 0.5}, {1}),  # reached exactly
        ({"top_p": 0.51}, {1, 2}),
        ({"top_p": 0.76}, {0, 1, 2}),
        ({"min_p": 0.49}, {1, 2}),
        ({"min_p": 0.51}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # 2/3 and 1/3 after top-k
        ({"min_p": 0.49, "top_p": 0.7}, {1, 2}),
        ({"top_k": 400}, {0, 1, 2, 3}),
        ({"temperature": 1e-300}, {1}),
    ],
)
def test_filters_keep_exactly_these_tokens(params: dict[str, float], kept: set[int]) -> None:
    assert set(draws([0.125, 0.5, 0.25, 0.125], n=300, **params)) == kept


@pytest.mark.parametrize("vocab_size", [50, 500])
def test_random_rows_equal_the_naive_formula(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    rows, lines = [], []
    for position in range(120):
        params = SamplingParams(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 5, 40, 2000]),
            top_p=rng.choice([1.0, 0.95, 0.5, 0.05]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.4]),
        )
        spread = rng.choice([0.1, 3.0])
        lines.append([round(rng.gauss(0, spread), 1) for _ in range(vocab_size)])  # rounding makes ties
        rows.append(row(params, position, seed=vocab_size))
    logits = torch.tensor(lines)
    got = [token.token_id for token in sample(logits, rows)]
    expected = [
        naive_choice(line, r.params, uniform(r.seed, r.position)) for line, r in zip(logits.tolist(), rows, strict=True)
    ]
    assert got == expected


def test_a_row_does_not_depend_on_the_rows_around_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 500, generator=generator)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_p=0.9, logprobs=2),
        SamplingParams(top_k=7),
        SamplingParams(logit_bias={3: 5.0}),
    ]
    rows = [row(kinds[i % 4], position=i, seed=i * i) for i in range(40)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(40)]


def test_penalties_equal_the_naive_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 10, generator=generator)
    counts = TokenCounts(10, num_prompt_tokens=3, device=torch.device("cpu"))
    counts.extend(0, (1, 2, 2))
    counts.extend(1, (2, 2, 4, 4, 5))  # the overlap is counted once
    counts.extend(6, (1,))
    assert counts.num_tokens == 7
    assert counts.seen.nonzero()[:, 0].tolist() == [1, 2, 4, 5]
    assert counts.output_counts.tolist() == [0, 1, 0, 0, 2, 1, 0, 0, 0, 0]
    bias = {0: 0.25, 4: 3.0}
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.75, logit_bias=bias
    )
    expected = logits[0].clone()
    for token in (1, 2, 4, 5):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, n in {1: 1, 4: 2, 5: 1}.items():
        expected[token] -= 0.75 * n - 0.5
    for token, value in bias.items():
        expected[token] += value
    before = logits.clone()
    adjusted = sampler_module._adjust(logits, [row(params, counts=counts)])
    assert torch.allclose(adjusted[0], expected, atol=1e-6)
    assert sample(logits, [row(params, counts=counts)])[0].token_id == int(expected.argmax())
    assert torch.equal(logits, before)


def test_logit_bias_bans_and_forces() -> None:
    logits = torch.tensor([[0.0, 4.0, 2.0]])
    assert sample(logits, [row(SamplingParams(temperature=0.0, logit_bias={1: -100.0}))])[0].token_id == 2
    assert sample(logits, [row(SamplingParams(logit_bias={0: 100.0}))])[0].token_id == 0


def test_logprobs_are_raw_and_ranked() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, -1.0]])
    expected = logits[0].log_softmax(dim=-1)
    params = SamplingParams(temperature=0.0, logit_bias={3: 50.0}, logprobs=3)
    token = sample(logits, [row(params)])[0]
    assert token.token_id == 3
    assert token.rank == 3
    assert token.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert [t for t, _ in token.top_logprobs] == [1, 2, 3]
    assert [p for _, p in token.top_logprobs] == pytest.approx([float(expected[t]) for t in (1, 2, 3)], abs=1e-6)


def test_ties_at_the_end_of_top_logprobs_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 100)
    token = sample(logits, [row(SamplingParams(temperature=0.0, logprobs=4))])[0]
    assert [t for t, _ in token.top_logprobs] == [0, 1, 2, 3]


def test_logprobs_zero_reports_the_chosen_token_alone_and_more_than_the_vocabulary_all() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    none, all_of_them = sample(
        logits.expand(2, -1), [row(SamplingParams(temperature=0.0, logprobs=k)) for k in (0, 20)]
    )
    assert none.rank == 1 and none.top_logprobs == ()
    assert [t for t, _ in all_of_them.top_logprobs] == [2, 1, 0]
