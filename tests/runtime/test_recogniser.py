"""Claims: whatever a module has more than a decoder, less, or in another way is refused by the part that differs; where
two ways look alike, what a part does with numbers tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_architecture import make
from tiny_llama import make_tiny_llama
from torch import nn

from anaphora.runtime.decoder import NO_ROTATION, GatedMlp, NotRecognisedError
from anaphora.runtime.recogniser import recognise

Change = Callable[[Any], None]


def put(path: str, value: Any) -> Change:
    """Set module.<path>, whose numbers are indices."""

    def change(module: Any) -> None:
        *way, name = path.split(".")
        holder = module
        for step in way:
            holder = holder[int(step)] if step.isdigit() else getattr(holder, step)
        setattr(holder, name, value)

    return change


def drop(path: str) -> Change:
    """Take the submodule of this path away."""

    def change(module: Any) -> None:
        *way, name = path.split(".")
        delattr(module.get_submodule(".".join(way)), name)

    return change


class Rescaled(nn.Linear):
    """A Linear that is more than one."""


class DeepNorm(nn.Module):
    """One weight, and a part that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.inner = nn.Parameter(torch.ones(64)), 1e-6, nn.Identity()


def nested(module: Any) -> None:
    """The decoder is a part of a part, as in a model that reads images, too."""
    inner = module.model
    del module.model
    module.tower = nn.Module()
    module.tower.inner = inner
    module.get_decoder = lambda: inner


def with_buffer(module: Any) -> None:
    module.model.embed_tokens.register_buffer("offset", torch.ones(1))


def head_dims_of_two_sizes(module: Any) -> None:
    module.model.layers[1].self_attn.head_dim = 8


def odd_head_dim(module: Any) -> None:
    for layer in module.model.layers:
        layer.self_attn.head_dim = 15


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("scale", nn.Identity()), "LlamaForCausalLM has scale besides"),
        (put("gain", nn.Parameter(torch.ones(1))), "LlamaForCausalLM has gain besides"),
        (nested, "its decoder is not a part of its outermost module"),
        (drop("model.norm"), "LlamaModel has no norm"),
        (put("model.embed_norm", nn.Identity()), "LlamaModel has embed_norm besides"),
        (put("model.gain", nn.Parameter(torch.ones(1))), "LlamaModel has gain besides"),
        (put("model.embed_tokens", nn.EmbeddingBag(8, 64)), "its embed_tokens is a EmbeddingBag"),
        (put("model.embed_tokens.max_norm", 1.0), "its embed_tokens is a Embedding"),
        (with_buffer, "its embed_tokens is a Embedding"),
        (put("model.layers", nn.ModuleList()), "its layers are not a list of modules"),
        (lambda module: put("model.layers", nn.Sequential(*module.model.layers))(module), "are not a list of modules"),
        (head_dims_of_two_sizes, "its layers have no one head_dim"),
        (odd_head_dim, "its layers have no one head_dim"),
        (put("model.layers.2.mlp.forward", lambda hidden: hidden), "the forward of its model.layers.2.mlp is replaced"),
        (put("forward", lambda **inputs: None), "the forward of its outermost module is replaced"),
        (drop("model.layers.1.mlp"), "LlamaDecoderLayer has no mlp"),
        (put("model.layers.1.gate", nn.Identity()), "LlamaDecoderLayer has gate besides"),
        (put("model.layers.1.gain", nn.Parameter(torch.ones(1))), "LlamaDecoderLayer has gain besides"),
        (
            put("model.layers.1.pre_feedforward_layernorm", nn.RMSNorm(64)),
            "LlamaDecoderLayer has no post_feedforward_layernorm",
        ),
        (drop("model.layers.1.self_attn.k_proj"), "LlamaAttention has no k_proj"),
        (put("model.layers.1.self_attn.gate", nn.Identity()), "LlamaAttention has gate besides"),
        (put("model.layers.1.self_attn.temperature", nn.Parameter(torch.ones(4))), "LlamaAttention has temperature"),
        (put("model.layers.3.self_attn.scaling", None), "its attention has no scaling"),
        (put("model.layers.3.self_attn.q_proj", Rescaled(64, 64)), "it has a Rescaled where a Linear is expected"),
        (put("model.layers.3.mlp.down_proj", Rescaled(128, 64)), "it has a Rescaled where a Linear is expected"),
        (put("lm_head", Rescaled(64, 256)), "it has a Rescaled where a Linear is expected"),
        (put("model.layers.0.mlp.act_fn", nn.PReLU()), "its activation has weights"),
        (put("model.norm", nn.LayerNorm(64)), "its LayerNorm is no RMS norm"),
        (put("model.norm", nn.RMSNorm(64)), "its RMSNorm is no RMS norm"),  # its eps is not said
        (put("model.norm", DeepNorm()), "its DeepNorm is no RMS norm"),
        (put("model.layers.0.self_attn.q_norm", nn.RMSNorm(64, eps=1e-6)), "its RMSNorm is not over one head"),
        (put("model.layers.0.self_attn.k_norm", nn.RMSNorm(32, eps=1e-6)), "its RMSNorm is not over one head"),
    ],
)
def test_a_module_that_differs_is_refused_by_the_part_that_does(change: Change, reason: str) -> None:
    module = make_tiny_llama()
    recognise(module)
    change(module)
    with pytest.raises(NotRecognisedError) as refused:
        recognise(module)
    assert reason in str(refused.value)


def test_the_parts_are_the_modules_own() -> None:
    module = make_tiny_llama()
    decoder = recognise(module)
    layer, own = decoder.layers[1], module.model.layers[1]
    assert decoder.embedding["weight"] is module.model.embed_tokens.weight
    assert decoder.head["weight"] is module.lm_head.weight
    assert (layer.query["weight"], layer.key["weight"]) == (own.self_attn.q_proj.weight, own.self_attn.k_proj.weight)
    assert (layer.value["weight"], layer.output["weight"]) == (own.self_attn.v_proj.weight, own.self_attn.o_proj.weight)
    assert isinstance(layer.mlp, GatedMlp)
    assert (layer.mlp.gate["weight"], layer.mlp.up["weight"], layer.mlp.down["weight"]) == (
        own.mlp.gate_proj.weight,
        own.mlp.up_proj.weight,
        own.mlp.down_proj.weight,
    )
    assert layer.input_norm.parameters["weight"] is own.input_layernorm.weight
    assert layer.mlp_norm.parameters["weight"] is own.post_attention_layernorm.weight
    assert (layer.attention_norm, layer.mlp_out_norm, layer.query_norm, layer.key_norm) == (None, None, None, None)
    assert (layer.soft_cap, layer.sinks, decoder.soft_cap, decoder.layer_types) == (None, None, None, (None,))


def test_an_mlp_of_other_parts_is_called_as_it_is() -> None:
    module: Any = make_tiny_llama()
    module.model.layers[2].mlp = experts = nn.Sequential(nn.Linear(64, 64))
    decoder = recognise(module)
    assert decoder.layers[2].mlp is experts
    assert isinstance(decoder.layers[1].mlp, GatedMlp)


@pytest.mark.parametrize(
    ("config_name", "class_name", "offset"),
    [("LlamaConfig", "LlamaForCausalLM", 0.0), ("GemmaConfig", "GemmaForCausalLM", 1.0)],
)
def test_what_a_norm_does_with_numbers_tells_what_its_weights_are(
    config_name: str, class_name: str, offset: float
) -> None:
    module: Any = make(config_name, class_name, head_dim=32)
    nn.init.normal_(module.model.norm.weight, generator=torch.Generator().manual_seed(3))
    assert recognise(module).norm.offset == offset


def test_gemmas_parts_stand_where_they_belong() -> None:
    types = ["sliding_attention", "full_attention"]
    settings = {"head_dim": 32, "layer_types": types, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
    module: Any = make("Gemma3TextConfig", "Gemma3ForCausalLM", **settings)
    module.model.layers[1].self_attn.attn_logit_softcapping = 0.0  # none
    decoder = recognise(module)
    assert (decoder.layer_types, [layer.rotary for layer in decoder.layers]) == (tuple(types), [0, 1])
    assert (decoder.layers[0].soft_cap, decoder.layers[1].soft_cap, decoder.soft_cap) == (5.0, None, 7.0)
    layer, own = decoder.layers[0], module.model.layers[0]
    norms = (layer.input_norm, layer.attention_norm, layer.mlp_norm, layer.mlp_out_norm)
    assert [norm.parameters["weight"] for norm in norms if norm is not None] == [
        own.input_layernorm.weight,
        own.post_attention_layernorm.weight,
        own.pre_feedforward_layernorm.weight,
        own.post_feedforward_layernorm.weight,
    ]
    assert layer.query_norm is not None and layer.query_norm.parameters["weight"] is own.self_attn.q_norm.weight
    assert layer.key_norm is not None and layer.key_norm.parameters["weight"] is own.self_attn.k_norm.weight


def test_a_layer_without_rotation_is_told_apart() -> None:
    decoder = recognise(make("SmolLM3Config", "SmolLM3ForCausalLM", no_rope_layers=[1, 0]))
    assert (decoder.layer_types, [layer.rotary for layer in decoder.layers]) == ((None, NO_ROTATION), [0, 1])
