"""Claims: what cannot be an embedding is refused with a typed error; it draws no seed; an engine may have none."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import make_engine

from anaphora.errors import InvalidParameterError
from anaphora.pooling_params import PoolingParams
from anaphora.sampling_params import SamplingParams, embedding_params


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"pooling": "cls"}, "pooling"),
        ({"pooling": None}, "pooling"),
        ({"normalize": 1}, "normalize"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"dimensions": 2.5}, "dimensions"),
    ],
)
def test_pooling_params_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{field} must"):
        PoolingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "last", "max_tokens": 0},
        {"pooling": PoolingParams()},  # max_tokens is 16
        {"pooling": PoolingParams(), "max_tokens": 0, "prompt_logprobs": 1},
        {"max_tokens": 0},
        {"pooling": PoolingParams(), "max_tokens": 0, "n": 2},
    ],
)
def test_an_embedding_comes_alone(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        SamplingParams(**options)


def test_it_has_a_seed_so_it_draws_none() -> None:
    assert embedding_params(PoolingParams("mean")) == SamplingParams(
        max_tokens=0, seed=0, pooling=PoolingParams("mean")
    )


def test_an_executor_without_hidden_states_refuses_and_keeps_nothing() -> None:
    engine, _, _ = make_engine()
    with pytest.raises(InvalidParameterError, match="hidden states"):
        engine.add_request("a", [1, 2, 3], embedding_params(PoolingParams()))
    assert not engine.has_unfinished
