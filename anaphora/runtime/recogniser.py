"""The parts of a decoder, seen in a loaded module by its structure.

Knows which submodules a decoder has and by which of them it differs from another; computes no step. No names of classes
and models are asked for: what has these parts and no others is a candidate, whose results decide.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from anaphora.runtime.decoder import (
    NO_ROTATION,
    Decoder,
    DecoderLayer,
    GatedMlp,
    Norm,
    NotRecognisedError,
    Parameters,
    tensor,
)
from anaphora.runtime.quantized_layers import QuantizedEmbedding, QuantizedLinear

# Names of a layer's norms. Two: before attention and MLP. Four: also of what these give.
_TWO_NORMS = {"input_layernorm", "post_attention_layernorm"}
_FOUR_NORMS = _TWO_NORMS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


def recognise(module: PreTrainedModel) -> Decoder:
    """The parts of a causal LM of this type. Raises NotRecognisedError."""
    model: Any = module
    decoder = model.get_decoder()
    _has_parts(module, required={_name_of(module, decoder), "lm_head"})
    _has_parts(decoder, required={"embed_tokens", "layers", "norm", "rotary_emb"})
    embedding = decoder.embed_tokens
    scales = dict(embedding.named_buffers(recurse=False))
    if (
        not isinstance(embedding, torch.nn.Embedding | QuantizedEmbedding)
        or getattr(embedding, "max_norm", None) is not None
        or scales.keys() - {"embed_scale"}
    ):
        raise NotRecognisedError(f"its embed_tokens is a {type(embedding).__name__}")
    if isinstance(embedding, QuantizedEmbedding) and embedding.stored.dtype != tensor(decoder.norm._parameters).dtype:
        raise NotRecognisedError("its embedding and its norm are of different dtypes")
    if type(decoder.layers) is not torch.nn.ModuleList or len(decoder.layers) == 0:
        raise NotRecognisedError("its layers are not a list of modules")
    head_dims = {getattr(layer.self_attn, "head_dim", None) for layer in decoder.layers if hasattr(layer, "self_attn")}
    head_dim = head_dims.pop() if len(head_dims) == 1 else None
    if not isinstance(head_dim, int) or head_dim % 2:
        raise NotRecognisedError("its layers have no one head_dim")
    patched = [name for name, part in module.named_modules() if "forward" in vars(part)]
    if patched:
        raise NotRecognisedError(f"the forward of its {patched[0] or 'outermost module'} is replaced")
    config: Any = module.config.get_text_config()
    named: list[str | None] = [None] * len(decoder.layers)
    if "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters:
        named = list(config.layer_types)[: len(decoder.layers)]
    for number, layer in enumerate(decoder.layers):
        if not getattr(getattr(layer, "self_attn", None), "use_rope", True):
            named[number] = NO_ROTATION
    rotations = tuple(dict.fromkeys(named))
    return Decoder(
        layers=tuple(
            _layer(layer, head_dim, rotations.index(name)) for layer, name in zip(decoder.layers, named, strict=True)
        ),
        head_dim=head_dim,
        embedding=embedding._parameters,
        scales=embedding._buffers,
        rotary=decoder.rotary_emb,
        layer_types=rotations,
        norm=_norm(decoder.norm),
        head=_linear(model.lm_head),
        soft_cap=_positive(config, "final_logit_softcapping"),
    )


def _layer(layer: torch.nn.Module, head_dim: int, rotary: int) -> DecoderLayer:
    part: Any = layer
    names = {name for name, _ in layer.named_children()}
    sandwich = "pre_feedforward_layernorm" in names
    _has_parts(layer, required={"self_attn", "mlp"} | (_FOUR_NORMS if sandwich else _TWO_NORMS))
    attention = part.self_attn
    _has_parts(attention, required={"q_proj", "k_proj", "v_proj", "o_proj"}, optional={"q_norm", "k_norm", "sinks"})
    scaling, names = getattr(attention, "scaling", None), {name for name, _ in attention.named_children()}
    if not isinstance(scaling, float):
        raise NotRecognisedError("its attention has no scaling")
    return DecoderLayer(
        attention=attention,
        scaling=scaling,
        soft_cap=_positive(attention, "attn_logit_softcapping"),
        sinks="sinks" if "sinks" in attention._parameters else None,
        rotary=rotary,
        input_norm=_norm(part.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        output=_linear(attention.o_proj),
        query_norm=_norm(attention.q_norm, head_dim) if "q_norm" in names else None,
        key_norm=_norm(attention.k_norm, head_dim) if "k_norm" in names else None,
        attention_norm=_norm(part.post_attention_layernorm) if sandwich else None,
        mlp_norm=_norm(part.pre_feedforward_layernorm if sandwich else part.post_attention_layernorm),
        mlp=_mlp(part.mlp),
        mlp_out_norm=_norm(part.post_feedforward_layernorm) if sandwich else None,
    )


def _mlp(mlp: torch.nn.Module) -> GatedMlp | torch.nn.Module:
    part: Any = mlp
    try:
        _has_parts(mlp, required={"gate_proj", "up_proj", "down_proj", "act_fn"})
    except NotRecognisedError:
        return mlp  # experts, say: it is called as it is
    if any(True for _ in part.act_fn.parameters()):
        raise NotRecognisedError("its activation has weights")
    return GatedMlp(_linear(part.gate_proj), _linear(part.up_proj), _linear(part.down_proj), part.act_fn)


def _has_parts(
    module: torch.nn.Module, *, required: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> None:
    names, kind = {name for name, _ in module.named_children()}, type(module).__name__
    if not required <= names:
        raise NotRecognisedError(f"{kind} has no {', '.join(sorted(required - names))}")
    others = (names - required | {name for name, _ in module.named_parameters(recurse=False)}) - optional
    if others:
        raise NotRecognisedError(f"{kind} has {', '.join(sorted(others))} besides")


def _name_of(module: torch.nn.Module, child: torch.nn.Module) -> str:
    for name, candidate in module.named_children():
        if candidate is child:
            return name
    raise NotRecognisedError("its decoder is not a part of its outermost module")


def _linear(module: torch.nn.Module) -> Parameters:
    if type(module) not in (
        torch.nn.Linear,
        QuantizedLinear,
    ):  # adapted, fused: it may do more than multiply
        raise NotRecognisedError(f"it has a {type(module).__name__} where a Linear is expected")
    return module._parameters


def _positive(holder: Any, name: str) -> float | None:
    value = getattr(holder, name, None)
    return float(value) if isinstance(value, int | float) and value > 0 else None


@torch.no_grad()
def _norm(module: torch.nn.Module, size: int | None = None) -> Norm:
    """Whether its weights are multiplied with, or kept as their distance from 1, shows what it does with numbers."""
    kind = type(module).__name__
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = [name for name, _ in module.named_parameters()]
    if not isinstance(eps, float) or names != ["weight"] or any(True for _ in module.children()):
        raise NotRecognisedError(f"its {kind} is no RMS norm")
    weight = tensor(module._parameters)
    if size is not None and weight.shape != (size,):
        raise NotRecognisedError(f"its {kind} is not over one head")
    sample = torch.linspace(-1, 1, weight.numel(), device=weight.device, dtype=weight.dtype).view(weight.shape)
    got, plain = module(sample).float(), F.rms_norm(sample.float(), weight.shape, None, eps)
    errors = [float((got - plain * (weight.float() + offset)).norm()) for offset in (0.0, 1.0)]
    return Norm(module._parameters, eps, 1.0 if errors[1] < errors[0] else 0.0)
