"""The oracle model of the tests: a tiny Llama whose every weight follows from one seed."""

from __future__ import annotations

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 384
MAX_POSITIONS = 4096


def make_tiny_llama() -> LlamaForCausalLM:
    """A float32 Llama with 4 layers, 4 heads and 2 KV heads, without an end token.

    Every parameter with two or more dimensions is randn * 0.1 from one generator (seed 7), in
    `named_parameters()` order; the others (norm weights) stay 1.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def ids(seed: int, n: int) -> list[int]:
    """n token ids in [8, 384), the same for the same seed everywhere."""
    rng = random.Random(seed)
    return [rng.randrange(8, VOCAB_SIZE) for _ in range(n)]
