"""Claims: pooling in chunks is pooling at once; rows have length 1 whatever their size; a failure gives none."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hand_plans import admit, make_executor, part, step
from tiny_llama import ids, make_tiny_llama
from transformers import LlamaConfig

from anaphora.errors import InvalidParameterError
from anaphora.pooling_params import POOLINGS, PoolingParams
from anaphora.runtime.pooling import Pooler, check_dimensions, trained_dimensions
from anaphora.sampling_params import embedding_params

ROWS = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
POOLED = {"last": ROWS[-1:], "mean": ROWS.mean(dim=0, keepdim=True), "token": ROWS}


def pool(params: PoolingParams, rows: torch.Tensor, *cuts: int) -> torch.Tensor:
    pooler = Pooler(params, len(rows))
    borders = [0, *cuts, len(rows)]
    for begin, end in pairwise(borders[:-1]):
        assert pooler.take(begin, rows[begin:end]) is None
    embedding = pooler.take(borders[-2], rows[borders[-2] :])
    assert embedding is not None
    return torch.tensor(embedding.rows())


@pytest.mark.parametrize("cuts", [(), (1,), (9,), (3, 4, 8)])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_chunks_do_not_matter(pooling: str, cuts: tuple[int, ...]) -> None:
    got = pool(PoolingParams(pooling, normalize=False), ROWS, *cuts)
    assert torch.allclose(got, POOLED[pooling], atol=1e-7)
    got = pool(PoolingParams(pooling), ROWS, *cuts)
    assert torch.allclose(got, torch.nn.functional.normalize(POOLED[pooling], dim=-1), atol=1e-7)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_rows_have_length_one_whatever_their_size(pooling: str, size: float) -> None:
    got = pool(PoolingParams(pooling), ROWS * size, 4)
    assert torch.allclose(got.norm(dim=-1), torch.ones(len(got)), atol=1e-6)


def test_a_row_of_zeros_stays_one() -> None:
    assert not pool(PoolingParams(), torch.zeros(3, 6)).any()


def test_a_cut_row_has_length_one_after_the_cut() -> None:
    got = pool(PoolingParams(dimensions=2), ROWS)
    assert torch.allclose(got, torch.nn.functional.normalize(ROWS[-1:, :2], dim=-1), atol=1e-7)


@pytest.mark.parametrize("pooling", ["mean", "token"])
def test_a_gap_is_a_bug_that_is_told(pooling: str) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        Pooler(PoolingParams(pooling), 10).take(4, ROWS[4:])


def test_only_models_that_say_so_are_cut() -> None:
    plain, listed, any_size = LlamaConfig(), LlamaConfig(matryoshka_dimensions=[2, 4]), LlamaConfig(is_matryoshka=True)
    for wanted, config, allowed in (
        (None, plain, True),
        (6, plain, True),
        (2, plain, False),
        (7, plain, False),
        (4, listed, True),
        (3, listed, False),
        (5, any_size, True),
        (7, any_size, False),
    ):
        if allowed:
            check_dimensions(wanted, 6, trained_dimensions(config))
        else:
            with pytest.raises(InvalidParameterError, match="Matryoshka"):
                check_dimensions(wanted, 6, trained_dimensions(config))


def test_a_request_that_fails_gives_no_embedding_and_others_do() -> None:
    module = make_tiny_llama()
    with torch.no_grad():
        module.model.embed_tokens.weight[100] = math.nan
    executor, bad, good = make_executor(module), [9, 100, 11], ids(1, 5)
    sampling = embedding_params(PoolingParams("mean"))
    result = step(
        executor,
        part("bad", 0, bad, [1], sample=False),
        part("good", 0, good, [2], sample=False),
        admitted=[admit("bad", bad, sampling), admit("good", good, sampling)],
    )
    assert result.failed.keys() == {"bad"}
    assert result.embeddings.keys() == {"good"}
    assert result.embeddings["good"].num_rows == 1
