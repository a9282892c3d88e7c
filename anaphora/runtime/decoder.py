"""A decoder of the Llama type, seen in a loaded module by its structure, and run layer by layer without the library.

    embedding -> layers -> norm -> head
    layer: norm -> q, k, v -> (norm of q, k) -> rotary -> attention -> o -> + -> norm -> MLP -> +

Knows which submodules such a decoder has and what it computes with them; knows nothing of plans, and of the pool only
the attention context. No names of classes are asked for: what has these parts and no others is a candidate, and
`anaphora.runtime.fast_forward` takes it only if it gives the module's own results. Weights are the module's own, read
anew at every step, so that an update in place, or a parameter put in the place of another, takes effect at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from anaphora.runtime import int8
from anaphora.runtime.attention import AttentionContext

Parameters = dict[str, torch.nn.Parameter | None]
"""A submodule's own parameters by name: the dictionary that it keeps, not a copy."""


class NotRecognisedError(Exception):
    """The module has not the structure; the message says where it differs. Never leaves `runtime`."""


@dataclass(frozen=True, slots=True)
class Norm:
    parameters: Parameters
    eps: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's parts. Linear parts are their parameters: `weight` [out, in], `bias` [out] or None.

    attention: the module itself, which attention contexts know by its `layer_idx`.
    activation: of the gate.
    """

    attention: torch.nn.Module
    scaling: float
    input_norm: Norm
    query: Parameters
    key: Parameters
    value: Parameters
    output: Parameters
    query_norm: Norm | None
    key_norm: Norm | None
    mlp_norm: Norm
    gate: Parameters
    up: Parameters
    down: Parameters
    activation: torch.nn.Module


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal LM's parts. head_dim: of queries, keys and values. embedding, head: `weight` [vocab, hidden]."""

    layers: tuple[DecoderLayer, ...]
    head_dim: int
    embedding: Parameters
    rotary: torch.nn.Module
    norm: Norm
    head: Parameters

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden]."""
        codes, scales = self.embedding.get("codes"), self.embedding.get("scales")
        if codes is not None and scales is not None:
            return int8.embed(token_ids, codes, scales)
        return F.embedding(token_ids, _weight(self.embedding))

    def rotations(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [T, head_dim] of positions [1, T].

        A vector x turns into `cos * x + sin * (x with its halves swapped)`.
        """
        cos, sin = self.rotary(hidden.unsqueeze(0), position_ids=position_ids)
        if cos.shape != (1, hidden.shape[0], self.head_dim):
            raise NotRecognisedError(f"its rotary embedding turns {cos.shape[-1]} of {self.head_dim} dimensions")
        sin = sin[0].clone()
        sin[:, : self.head_dim // 2].neg_()
        return cos[0], sin

    def run_layer(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        context: AttentionContext,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], in the memory of the argument."""
        shape = (hidden.shape[0], -1, self.head_dim)
        normed = normalise(hidden, layer.input_norm)
        query = project(normed, layer.query).view(shape)
        key = project(normed, layer.key).view(shape)
        value = project(normed, layer.value).view(shape)
        if layer.query_norm is not None:
            query = normalise(query, layer.query_norm)
        if layer.key_norm is not None:
            key = normalise(key, layer.key_norm)
        attended = context.attend(
            layer.attention,
            _rotate(query, rotations).transpose(0, 1).unsqueeze(0),
            _rotate(key, rotations).transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            scaling=layer.scaling,
        )
        hidden += project(attended.reshape(hidden.shape[0], -1), layer.output)
        normed = normalise(hidden, layer.mlp_norm)
        gate = layer.activation(project(normed, layer.gate))
        hidden += project(gate.mul_(project(normed, layer.up)), layer.down)
        return hidden


def recognise(module: PreTrainedModel) -> Decoder:
    """The parts of a causal LM of this type. Raises NotRecognisedError."""
    model: Any = module
    decoder = model.get_decoder()
    _has_parts(module, required={_name_of(module, decoder), "lm_head"})
    _has_parts(decoder, required={"embed_tokens", "layers", "norm", "rotary_emb"})
    embedding = decoder.embed_tokens
    if isinstance(embedding, int8.Int8Embedding):
        if embedding.embed_scale is not None:
            raise NotRecognisedError("its embed_tokens is scaled")
    elif type(embedding) is not torch.nn.Embedding or embedding.max_norm is not None:
        raise NotRecognisedError(f"its embed_tokens is a {type(decoder.embed_tokens).__name__}")
    if type(decoder.layers) is not torch.nn.ModuleList or len(decoder.layers) == 0:
        raise NotRecognisedError("its layers are not a list of modules")
    head_dims = {getattr(layer.self_attn, "head_dim", None) for layer in decoder.layers if hasattr(layer, "self_attn")}
    head_dim = head_dims.pop() if len(head_dims) == 1 else None
    if not isinstance(head_dim, int) or head_dim % 2:
        raise NotRecognisedError("its layers have no one head_dim")
    patched = [name for name, part in module.named_modules() if "forward" in vars(part)]
    if patched:
        raise NotRecognisedError(f"the forward of its {patched[0] or 'outermost module'} is replaced")
    return Decoder(
        layers=tuple(_layer(layer, head_dim) for layer in decoder.layers),
        head_dim=head_dim,
        embedding=decoder.embed_tokens._parameters,
        rotary=decoder.rotary_emb,
        norm=_norm(decoder.norm),
        head=_linear(model.lm_head),
    )


def normalise(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    """RMS norm over the last dimension."""
    weight = _weight(norm.parameters)
    return F.rms_norm(hidden, weight.shape, weight, norm.eps)


def project(hidden: torch.Tensor, linear: Parameters) -> torch.Tensor:
    codes, scales, bias = linear.get("codes"), linear.get("scales"), linear.get("bias")
    if codes is not None and scales is not None:
        return int8.linear(hidden, codes, scales, bias)
    return F.linear(hidden, _weight(linear), bias)


def _rotate(heads: torch.Tensor, rotations: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Heads [T, n, head_dim]."""
    cos, sin = (part.unsqueeze(1) for part in rotations)
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).addcmul_(swapped, sin)


def _weight(parameters: Parameters) -> torch.Tensor:
    weight = parameters["weight"]
    if weight is None:
        raise NotRecognisedError("a weight is missing")
    return weight


def _layer(layer: torch.nn.Module, head_dim: int) -> DecoderLayer:
    part: Any = layer
    _has_parts(layer, required={"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"})
    attention, mlp = part.self_attn, part.mlp
    _has_parts(attention, required={"q_proj", "k_proj", "v_proj", "o_proj"}, optional={"q_norm", "k_norm"})
    _has_parts(mlp, required={"gate_proj", "up_proj", "down_proj", "act_fn"})
    if any(True for _ in mlp.act_fn.parameters()):
        raise NotRecognisedError("its activation has weights")
    scaling, names = getattr(attention, "scaling", None), dict(attention.named_children())
    if not isinstance(scaling, float):
        raise NotRecognisedError("its attention has no scaling")
    return DecoderLayer(
        attention=attention,
        scaling=scaling,
        input_norm=_norm(part.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        output=_linear(attention.o_proj),
        query_norm=_norm(attention.q_norm, head_dim) if "q_norm" in names else None,
        key_norm=_norm(attention.k_norm, head_dim) if "k_norm" in names else None,
        mlp_norm=_norm(part.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        activation=mlp.act_fn,
    )


def _has_parts(
    module: torch.nn.Module, *, required: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> None:
    names, kind = {name for name, _ in module.named_children()}, type(module).__name__
    if not required <= names:
        raise NotRecognisedError(f"{kind} has no {', '.join(sorted(required - names))}")
    others = names - required - optional | {name for name, _ in module.named_parameters(recurse=False)}
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
        int8.Int8Linear,
    ):  # quantised, adapted, fused: it may do more than multiply
        raise NotRecognisedError(f"it has a {type(module).__name__} where a Linear is expected")
    return module._parameters


def _norm(module: torch.nn.Module, size: int | None = None) -> Norm:
    name = type(module).__name__
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = [name for name, _ in module.named_parameters()]
    if not isinstance(eps, float) or names != ["weight"] or any(True for _ in module.children()):
        raise NotRecognisedError(f"its {name} is no RMS norm")
    if size is not None and module.get_parameter("weight").shape != (size,):
        raise NotRecognisedError(f"its {name} is not over one head")
    return Norm(module._parameters, eps)
