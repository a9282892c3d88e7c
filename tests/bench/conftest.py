"""The tiny Llama as an engine in this process and as a server, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_world import Live, make_tokenizer, serving
from tiny_llama import make_tiny_llama

from anaphora.api.build import build_engine
from anaphora.config import EngineConfig
from anaphora.runtime.model import LoadedModel, load_model


@pytest.fixture(scope="session")
def loaded_tiny() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(make_tiny_llama(), tokenizer=make_tokenizer(), dtype="float32")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, loaded_tiny: LoadedModel) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    loaded_tiny.module.save_pretrained(folder)
    tokenizer: Any = loaded_tiny.tokenizer
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bench_server(loaded_tiny: LoadedModel) -> Iterator[Live]:
    """A server of 64 blocks of 16."""
    config = EngineConfig(loaded_tiny.module, tokenizer=loaded_tiny.tokenizer, num_blocks=64, num_threads=1)
    with serving(build_engine(config)) as running:
        yield running
