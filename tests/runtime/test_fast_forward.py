"""Claims: decoders are known by structure and taken only if exact; what their owner changes later has its effect."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hand_plans import admit, assert_sampled, make_executor, part, step
from test_architecture import GPT2_SIZES, make
from tiny_llama import ids, make_tiny_llama
from transformers import LlamaForCausalLM

from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.fast_forward import FastForward, make_forward
from anaphora.runtime.forward import PagedForward

TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config_name", "class_name", "settings"),
    [
        ("LlamaConfig", "LlamaForCausalLM", {}),
        ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
        ("Qwen2Config", "Qwen2ForCausalLM", {}),
        ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}),
        ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 1]}),
        ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 32}),
        ("MixtralConfig", "MixtralForCausalLM", {"sliding_window": None}),
        ("GptOssConfig", "GptOssForCausalLM", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_the_structure_is_recognised_whatever_its_class(
    config_name: str, class_name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    module = make(config_name, class_name, **settings)
    shake(module)
    module = module.to(dtype)
    assert isinstance(make_forward(module, inspect_model(module, 256), fast=True), FastForward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config_name", "class_name", "settings"),
    [
        ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 32}),
        ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 80, "hidden_size": 84, "intermediate_size": 101}),
        ("MistralConfig", "MistralForCausalLM", {"head_dim": 64, "sliding_window": 9}),
        ("Qwen2Config", "Qwen2ForCausalLM", {"num_attention_heads": 2}),
        ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 128}),
        ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
        ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 96}),
        ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 64, "sliding_window": 9}),
        ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 32, "attn_logit_softcapping": 0.7}),
        ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 256, "layer_types": TYPES, "sliding_window": 9}),
    ],
)
def test_kernels_take_what_models_add_to_a_llama(
    config_name: str, class_name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Windows, biases, norms of heads and of what is added, soft caps, two rotary bases: each weighs in the check."""
    pytest.importorskip("numba")
    module = make(config_name, class_name, **settings)
    shake(module)
    module = module.to(dtype)
    forward = make_forward(module, inspect_model(module, 256), fast=True)
    assert isinstance(forward, FastForward)
    assert forward._kernels


def shake(module: torch.nn.Module) -> None:
    """Biases, sinks and norms are drawn, too: as they are made, they would change nothing."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.mark.parametrize(
    ("config_name", "class_name", "settings", "reason"),
    [
        ("GPT2Config", "GPT2LMHeadModel", GPT2_SIZES, "GPT2Model has no embed_tokens, layers, norm, rotary_emb"),
        ("Phi3Config", "Phi3ForCausalLM", {}, "Phi3DecoderLayer has resid_attn_dropout, resid_mlp_dropout besides"),
        # the same parts, another computation: rotary over neighbours, multipliers
        ("HeliumConfig", "HeliumForCausalLM", {"head_dim": 16}, "its layer 0 gives other results"),
        ("GraniteConfig", "GraniteForCausalLM", {"residual_multiplier": 0.9}, "its layer 0 gives other results"),
        ("GraniteConfig", "GraniteForCausalLM", {"embedding_multiplier": 2.0}, "its embedding gives other results"),
        ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 2.0}, "its head gives other results"),
    ],
)
def test_what_computes_otherwise_runs_through_the_library_and_the_log_says_why(
    config_name: str, class_name: str, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = make(config_name, class_name, **settings)
    with caplog.at_level(logging.INFO, "anaphora.runtime"):
        assert isinstance(make_forward(module, inspect_model(module, 256), fast=True), PagedForward)
    (record,) = [record for record in caplog.records if record.name == "anaphora.runtime.fast_forward"]
    assert reason in record.getMessage()


def test_it_can_be_switched_off(tiny_llama: LlamaForCausalLM) -> None:
    assert isinstance(make_forward(tiny_llama, inspect_model(tiny_llama, 256), fast=False), PagedForward)


def double_in_place(module: LlamaForCausalLM) -> None:
    module.model.layers[1].mlp.up_proj.weight.mul_(2)


def another_parameter(module: LlamaForCausalLM) -> None:
    old = module.model.layers[2].self_attn.k_proj
    old.weight = torch.nn.Parameter(old.weight.flip(0))


def another_submodule(module: LlamaForCausalLM) -> None:
    module.model.layers[0].self_attn.q_proj = torch.nn.Sequential(module.model.layers[0].self_attn.q_proj)


def another_forward(module: LlamaForCausalLM) -> None:
    module.model.layers[3].mlp.forward = lambda hidden: hidden.sin()


def a_hook(module: LlamaForCausalLM) -> None:
    module.model.layers[1].self_attn.o_proj.register_forward_hook(lambda part, args, output: -output)


def a_hook_before(module: LlamaForCausalLM) -> None:
    module.lm_head.register_forward_pre_hook(lambda part, args: (args[0].flip(-1),))


@pytest.mark.parametrize(
    "change", [double_in_place, another_parameter, another_submodule, another_forward, a_hook, a_hook_before]
)
@torch.no_grad()
def test_what_is_done_to_the_module_later_has_its_effect(change: Any) -> None:
    module = make_tiny_llama()
    executor = make_executor(module)
    a, b = ids(1, 40), ids(2, 20)
    step(executor, part("a", 0, a, [4, 1, 3]), admitted=[admit("a", a)])
    change(module)
    executor._weights.take_over(executor._weights.history)  # or a step refuses weights that were written to
    result = step(executor, part("b", 0, b, [5, 6]), admitted=[admit("b", b)])
    b.append(assert_sampled(module, result, "b", b))
    assert_sampled(module, step(executor, part("b", 20, b[20:])), "b", b)
