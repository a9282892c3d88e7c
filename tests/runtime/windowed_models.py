"""Tiny random models of real `transformers` classes whose layers do not all see every earlier token."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def make_windowed(config_name: str, class_name: str, **settings: Any) -> PreTrainedModel:
    """Weights are randn * 0.1 in float32."""
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **settings})
    module = getattr(transformers, class_name)(config).float().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, parameter in module.named_parameters():
            if name.endswith("sinks"):  # one score for each head: large enough to matter
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def mistral(window: int) -> PreTrainedModel:
    """All layers windowed."""
    return make_windowed("MistralConfig", "MistralForCausalLM", num_hidden_layers=2, sliding_window=window)


def gemma3(window: int) -> PreTrainedModel:
    """Two full layers, five windowed ones: three groups of windowed layers, the last half empty."""
    types = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING]
    return make_windowed(
        "Gemma3TextConfig", "Gemma3ForCausalLM", num_hidden_layers=7, layer_types=types, sliding_window=window
    )


def gpt_oss(window: int) -> PreTrainedModel:
    """Windowed and full in turn; attention sinks, experts."""
    return make_windowed("GptOssConfig", "GptOssForCausalLM", num_hidden_layers=4, sliding_window=window, **MOE)


def llama4(chunk: int) -> PreTrainedModel:
    """Three chunked layers and a full one without rotary embedding; experts."""
    return make_windowed(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        num_hidden_layers=4,
        attention_chunk_size=chunk,
        intermediate_size_mlp=96,
        interleave_moe_layer_step=2,
        **MOE,
    )


def qwen3(window: int) -> PreTrainedModel:
    """Full, then windowed."""
    types = [FULL, SLIDING, SLIDING]
    return make_windowed(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        num_hidden_layers=3,
        layer_types=types,
        use_sliding_window=True,
        sliding_window=window,
    )


def gemma4(window: int) -> PreTrainedModel:
    """Three windowed layers and a full one, whose heads are twice as long."""
    return make_windowed(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        num_hidden_layers=4,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        sliding_window=window,
        global_head_dim=32,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=384,
        hidden_size_per_layer_input=16,
    )


FAMILIES = {
    "gemma4": gemma4,
    "mistral": mistral,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "qwen3": qwen3,
}
