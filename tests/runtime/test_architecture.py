"""Which `transformers` classes are served, seen on tiny random models; the others are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hand_plans import admit, assert_sampled, make_executor, part, step
from tiny_llama import ids
from transformers import PreTrainedModel

from anaphora.core.groups import CacheLayout, FullAttention
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.kv_cache import KVShape, LayerPlace

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
MLA_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def make(config_name: str, class_name: str, **settings: Any) -> PreTrainedModel:
    """A random float32 model with weights large enough for attention to matter."""
    torch.manual_seed(0)
    module = getattr(transformers, class_name)(getattr(transformers, config_name)(**{**SIZES, **settings})).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return module


@pytest.mark.parametrize(
    ("config_name", "class_name", "settings", "shape"),
    [
        ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}, KVShape(2, 16, 16)),
        ("Qwen2Config", "Qwen2ForCausalLM", {}, KVShape(2, 16, 16)),
        ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}, KVShape(2, 24, 24)),
        ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 32}, KVShape(2, 32, 32)),
        ("Phi3Config", "Phi3ForCausalLM", {}, KVShape(2, 16, 16)),
        ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}, KVShape(4, 16, 16)),
        ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 64}, KVShape(4, 16, 16)),
        ("GPT2Config", "GPT2LMHeadModel", GPT2_SIZES, KVShape(4, 16, 16)),
        ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}, KVShape(2, 16, 16)),
        # keys and values of different length
        ("DeepseekV3Config", "DeepseekV3ForCausalLM", MLA_SIZES, KVShape(4, 24, 12)),
        # capped scores; a window as long as the context is full attention
        ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 32, "sliding_window": 128}, KVShape(2, 32, 32)),
        # attention sinks
        (
            "GptOssConfig",
            "GptOssForCausalLM",
            {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
            KVShape(2, 16, 16),
        ),
    ],
)
def test_these_classes_give_their_own_results(
    config_name: str, class_name: str, settings: dict[str, Any], shape: KVShape
) -> None:
    module = make(config_name, class_name, **settings)
    layout = inspect_model(module, 128)
    assert layout.places == (LayerPlace(0, 0, shape), LayerPlace(0, 1, shape))
    assert layout.cache == CacheLayout((FullAttention(),))
    assert layout.vocab_size == 384
    executor = make_executor(module, max_len=128)
    a, b = ids(1, 60), ids(2, 20)
    step(executor, part("a", 0, a[:37], [4, 1, 3, 2], sample=False), admitted=[admit("a", a)])
    result = step(executor, part("a", 37, a[37:]), part("b", 0, b, [9, 7]), admitted=[admit("b", b)])
    a.append(assert_sampled(module, result, "a", a))
    b.append(assert_sampled(module, result, "b", b))
    result = step(executor, part("b", 20, b[20:]), part("a", 60, a[60:]))
    assert_sampled(module, result, "a", a)
    assert_sampled(module, result, "b", b)


@pytest.mark.parametrize(
    ("config_name", "class_name", "settings", "reason"),
    [
        (
            "MiniMaxConfig",
            "MiniMaxForCausalLM",
            {"layer_types": ["linear_attention", "full_attention"]},
            r"layers of type linear_attention; supported are full_attention, sliding_attention, chunked_attention, and "
            "recurrent ones that keep their state",
        ),
        ("BloomConfig", "BloomForCausalLM", {}, "does not use the attention interface"),
        ("FalconConfig", "FalconForCausalLM", {}, "does not use the attention interface"),
        ("StableLmConfig", "StableLmForCausalLM", {}, "does not get the keyword arguments"),
        ("BertConfig", "BertLMHeadModel", {}, "sees later tokens, as an encoder does"),
        ("LlamaConfig", "LlamaModel", {}, "is not a causal LM"),
        ("LlamaConfig", "LlamaForSequenceClassification", {}, "is not a causal LM"),
        ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "num_layers": 1}, "encoder-decoder"),
        (
            "LlamaConfig",
            "LlamaForCausalLM",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 64,
            },
            r"scales its rotary embedding \(dynamic\) .* set max_model_len to 64 or less",
        ),
    ],
)
def test_these_are_refused(config_name: str, class_name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        make_executor(make(config_name, class_name, **settings), max_len=128)


def test_bfloat16_models_pass_the_comparison_with_themselves() -> None:
    module = make("LlamaConfig", "LlamaForCausalLM").to(torch.bfloat16)
    assert inspect_model(module, 128).dtype == torch.bfloat16
    executor = make_executor(module, max_len=128)
    assert executor.cache.keys[0].dtype == torch.bfloat16
    result = step(executor, part("a", 0, ids(1, 20), [1, 2]), admitted=[admit("a", ids(1, 20))])
    assert list(result.sampled) == ["a"]
