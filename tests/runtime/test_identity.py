"""The root names what the model is: the fields of docs/hash-format.md, and whatever changes K/V changes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_llama import make_tiny_llama

from anaphora.api.build import model_identity
from anaphora.config import EVICTION_POLICIES, EngineConfig
from anaphora.core.eviction import POLICIES
from anaphora.runtime.model import load_model

PAGE = Path(__file__).parents[2] / "docs" / "hash-format.md"


@pytest.fixture(scope="module")
def loaded():  # type: ignore[no-untyped-def]
    return load_model(make_tiny_llama())


def test_the_page_lists_the_fields(loaded) -> None:  # type: ignore[no-untyped-def]
    (sentence,) = re.findall(r"The engine's fields: (.*?)\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    listed = set(re.findall(r"`(\w+)`", sentence))
    assert listed == set(model_identity(EngineConfig(model="any"), loaded))


@pytest.mark.parametrize("options", [{"block_size": 8}, {"hash_algorithm": "xxh3_128"}])
def test_what_the_engine_decides_is_in_it(loaded, options) -> None:  # type: ignore[no-untyped-def]
    before, after = (model_identity(EngineConfig(model="any", **given), loaded) for given in ({}, options))
    assert {name for name in before if before[name] != after[name]} == set(options)


def test_every_eviction_policy_can_be_chosen() -> None:
    assert tuple(POLICIES) == EVICTION_POLICIES
