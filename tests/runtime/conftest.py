"""What the runtime's tests share: the tiny oracle model, loaded once, and one torch thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_llama import make_tiny_llama
from transformers import LlamaForCausalLM


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """Shared by tests that leave it as it is."""
    return make_tiny_llama()
