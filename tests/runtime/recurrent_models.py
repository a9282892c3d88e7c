"""Tiny random models of real `transformers` classes with recurrent layers: convolutions, delta rules, state spaces."""

from __future__ import annotations

from transformers import PreTrainedModel
from windowed_models import make_windowed


def lfm2() -> PreTrainedModel:
    """Short convolutions and full attention in turn."""
    types = ["conv", "full_attention", "conv", "full_attention"]
    return make_windowed("Lfm2Config", "Lfm2ForCausalLM", num_hidden_layers=4, layer_types=types)


def qwen3_next() -> PreTrainedModel:
    """Three gated delta rules and a full attention; experts."""
    return make_windowed(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def jamba() -> PreTrainedModel:
    """Mamba layers, which take one token at a time once they have a state, and full attention."""
    return make_windowed(
        "JambaConfig", "JambaForCausalLM", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=2
    )


def falcon_h1() -> PreTrainedModel:
    """Attention and a state space side by side in each layer."""
    return make_windowed(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        num_hidden_layers=2,
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
    )


def mamba2() -> PreTrainedModel:
    """No attention at all."""
    return make_windowed(
        "Mamba2Config", "Mamba2ForCausalLM", num_hidden_layers=2, num_heads=8, head_dim=16, n_groups=2, state_size=16
    )


FAMILIES = {"lfm2": lfm2, "qwen3_next": qwen3_next, "jamba": jamba, "falcon_h1": falcon_h1, "mamba2": mamba2}
