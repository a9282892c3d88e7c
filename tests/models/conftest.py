"""What the tests of real weights share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from anaphora.runtime.sources import default_cache_dir
from anaphora.runtime.sources.folder import load_tokenizer
from anaphora.runtime.sources.progress import Progress
from anaphora.runtime.sources.resolve import resolve_model


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    """The tokenizer of a built-in model, without its weights."""

    @functools.cache
    def load(name: str) -> Any:
        return load_tokenizer(resolve_model(name, default_cache_dir(), Progress(False)).folder)

    return load
