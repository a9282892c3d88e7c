"""Servers over the tiny Llama, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from server_world import Live, make_tokenizer, serving
from tiny_llama import make_tiny_llama

from anaphora.api.build import build_engine
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.sampling_params import SamplingParams


@pytest.fixture(scope="session")
def tiny() -> Any:
    torch.set_num_threads(1)
    return make_tiny_llama()


@pytest.fixture(scope="session")
def make_engine(tiny: Any) -> Callable[..., Engine]:
    """Engine options -> an engine over the tiny Llama."""
    tokenizer = make_tokenizer()

    def make(**options: Any) -> Engine:
        values = {"model": tiny, "tokenizer": tokenizer, "num_blocks": 256, "num_threads": 1}
        return build_engine(EngineConfig(**(values | options)))

    first = make()  # kernels are compiled in the first step of a process: here, not where a test looks at the clock
    first.add_request("warm-up", [8, 9], SamplingParams(max_tokens=2))
    while first.has_unfinished:
        first.step()
    return make


@pytest.fixture(scope="module")
def live(make_engine: Callable[..., Engine]) -> Iterator[Live]:
    """A server with 256 blocks of 16, shared by the tests of a module: reset it first."""
    with serving(make_engine()) as running:
        yield running
