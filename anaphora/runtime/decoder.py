"""A decoder in parts, run layer by layer without the library.

    embedding (× scale) -> layers -> norm -> head (soft cap)
    layer: norm -> q, k, v -> (norm of q, k) -> rotary -> attention -> o -> (norm) -> + -> norm -> MLP -> (norm) -> +

Knows which parts such a decoder has and what it computes with them; knows nothing of plans, and of the pool only the
attention context. `anaphora.runtime.recogniser` finds the parts in a module, and `anaphora.runtime.fast_forward` takes
them only if they give the module's own results. Weights are the module's own, read anew at every step, so that an
update in place, or a parameter put in the place of another, takes effect at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from anaphora.runtime import codes as stored
from anaphora.runtime.attention import AttentionContext

Parameters = dict[str, torch.nn.Parameter | None]
"""A submodule's own parameters by name: the dictionary that it keeps, not a copy."""

NO_ROTATION = "none"
"""In the place of a layer type: queries and keys stay as they are."""

Rotations = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""For each rotary embedding, cosines and signed sines [T, head_dim]; see Decoder.rotations."""


class NotRecognisedError(Exception):
    """The module has not the structure; the message says where it differs. Never leaves `runtime`."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm. offset: what is added to the weight: 0, or 1 where weights are kept as their distance from 1."""

    parameters: Parameters
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) × up(x)). Linear parts as in a layer."""

    gate: Parameters
    up: Parameters
    down: Parameters
    activation: torch.nn.Module


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's parts. Linear parts are their parameters: `weight` [out, in], `bias` [out] or None.

    attention: the module itself, which attention contexts know by its `layer_idx`.
    soft_cap: of scores. sinks: one more score for each head, in the attention's parameters under this name.
    rotary: the number of its rotary embedding.
    attention_norm, mlp_out_norm: of what attention and MLP give, before it is added.
    mlp: a module where it is no gated one (experts): it is called as it is.
    """

    attention: torch.nn.Module
    scaling: float
    soft_cap: float | None
    sinks: str | None
    rotary: int
    input_norm: Norm
    query: Parameters
    key: Parameters
    value: Parameters
    output: Parameters
    query_norm: Norm | None
    key_norm: Norm | None
    attention_norm: Norm | None
    mlp_norm: Norm
    mlp: GatedMlp | torch.nn.Module
    mlp_out_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal LM's parts. head_dim: of queries, keys and values. embedding, head: `weight` [vocab, hidden].

    scales: the buffers of the embedding, of which `embed_scale`, if there, multiplies what it gives.
    layer_types: what the rotary module is asked for, for each rotary embedding; None where it has only one; or
        NO_ROTATION.
    soft_cap: of logits.
    """

    layers: tuple[DecoderLayer, ...]
    head_dim: int
    embedding: Parameters
    scales: dict[str, torch.Tensor | None]
    rotary: torch.nn.Module
    layer_types: tuple[str | None, ...]
    norm: Norm
    head: Parameters
    soft_cap: float | None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden]."""
        codes, scales = self.embedding.get("codes"), self.embedding.get("scales")
        if codes is not None and scales is not None:
            hidden = stored.embed(token_ids, codes, scales, tensor(self.norm.parameters).dtype)
        else:
            hidden = F.embedding(token_ids, tensor(self.embedding))
        scale = self.scales.get("embed_scale")
        return hidden if scale is None else hidden * scale.to(hidden.dtype)

    def rotations(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Rotations:
        """Cosines and signed sines of positions [1, T].

        A vector x turns into `cos * x + sin * (x with its halves swapped)`.
        """
        found = []
        for layer_type in self.layer_types:
            if layer_type == NO_ROTATION:
                still = hidden.new_ones((hidden.shape[0], self.head_dim))
                found.append((still, torch.zeros_like(still)))
                continue
            more = {} if layer_type is None else {"layer_type": layer_type}
            cos, sin = (part[0] for part in self.rotary(hidden.unsqueeze(0), position_ids=position_ids, **more))
            half = self.head_dim // 2
            if cos.shape == (hidden.shape[0], half):
                cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
            if cos.shape != (hidden.shape[0], self.head_dim):
                raise NotRecognisedError(f"its rotary embedding turns {cos.shape[-1]} of {self.head_dim} dimensions")
            sin = sin.clone()
            sin[:, :half].neg_()
            found.append((cos, sin))
        return tuple(found)

    def run_layer(
        self, layer: DecoderLayer, hidden: torch.Tensor, rotations: Rotations, context: AttentionContext
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
            _rotate(query, rotations[layer.rotary]).transpose(0, 1).unsqueeze(0),
            _rotate(key, rotations[layer.rotary]).transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            scaling=layer.scaling,
            softcap=layer.soft_cap,
            s_aux=None if layer.sinks is None else layer.attention._parameters[layer.sinks],
        )
        attended = project(attended.reshape(hidden.shape[0], -1), layer.output)
        hidden += attended if layer.attention_norm is None else normalise(attended, layer.attention_norm)
        return self.run_mlp(layer, hidden)

    def run_mlp(self, layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
        """The second half of a layer: [T, hidden] -> [T, hidden], in the memory of the argument."""
        normed, mlp = normalise(hidden, layer.mlp_norm), layer.mlp
        if isinstance(mlp, GatedMlp):
            gate = mlp.activation(project(normed, mlp.gate))
            added = project(gate.mul_(project(normed, mlp.up)), mlp.down)
        else:
            output = mlp(normed.unsqueeze(0))
            added = (output[0] if isinstance(output, tuple) else output).view_as(hidden)
        hidden += added if layer.mlp_out_norm is None else normalise(added, layer.mlp_out_norm)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] after the last norm -> [n, vocab]."""
        logits = project(hidden, self.head)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


def normalise(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    """RMS norm over the last dimension."""
    weight = tensor(norm.parameters)
    if norm.offset == 0:
        return F.rms_norm(hidden, weight.shape, weight, norm.eps)
    # In float32: a sum of 1 and a weight that is near it would lose the weight's last bits.
    return F.rms_norm(hidden.float(), weight.shape, weight.float() + norm.offset, norm.eps).to(hidden.dtype)


def project(hidden: torch.Tensor, linear: Parameters) -> torch.Tensor:
    codes, scales, bias = linear.get("codes"), linear.get("scales"), linear.get("bias")
    if codes is not None and scales is not None:
        return stored.linear(hidden, codes, scales, bias)
    return F.linear(hidden, tensor(linear), bias)


def weight_name(parameters: Parameters) -> str:
    return "codes" if "codes" in parameters else "weight"


def tensor(parameters: Parameters) -> torch.Tensor:
    """The weight, or the codes that stand for it. Raises NotRecognisedError if it is gone."""
    weight = parameters[weight_name(parameters)]
    if weight is None:
        raise NotRecognisedError("a weight is missing")
    return weight


def shape(parameters: Parameters) -> torch.Size:
    """Of the weight, or of the one that codes stand for. Raises NotRecognisedError if it is gone."""
    weight = tensor(parameters)
    return stored.matrix_shape(weight) if "codes" in parameters else weight.shape


def num_half_bytes(parameters: Parameters) -> int:
    """Of each code; 0 if the weight is no codes."""
    return stored.num_bits(tensor(parameters)) // 4 if "codes" in parameters else 0


def _rotate(heads: torch.Tensor, rotations: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Heads [T, n, head_dim]."""
    cos, sin = (part.unsqueeze(1) for part in rotations)
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).addcmul_(swapped, sin)
