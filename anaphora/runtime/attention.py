"""Attention over the K/V pool in plain PyTorch: the reference that every faster backend is tested against.

Knows a step's tensors and the pool; knows nothing of requests. `transformers` calls it through its attention
interface, under ATTENTION_NAME, once per layer; the step's context arrives as the forward's keyword argument
`paged_context`. Every layer writes all new keys and values of the step before it reads any: a request may read
blocks that another request of the same step writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from anaphora.errors import UnsupportedModelError
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.state_cache import StateContext

ATTENTION_NAME = "anaphora_paged"
"""Steps run under this name. No mask is registered for it, so `transformers` makes none."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Sequences whose attention is one call: one sequence with any number of new tokens, or several with one each.

    begin, end: their new tokens in the packed batch, `num_seqs` sequences after one another.
    block_ids: [num_seqs * n], n for each sequence, padded with the null block: those with keys that are seen.
    num_unseen, num_keys: of each sequence's gathered keys, the first `num_unseen` are seen by no new token and are
        left out; the next `num_keys` take part. Exact for one sequence; 0 and n * block_size for several.
    is_causal: one sequence whose keys are its new tokens and no others; `mask` is None then.
    mask: added to the scores, 0 or -inf; broadcasts to [num_seqs, 1, new tokens, num_keys]. None: all keys are seen.
    stale_slots: rows of the gathered blocks that lie behind a sequence's end in its last block. What an
        earlier owner left there is set to zero, as a masked NaN would still be NaN. None: there are none.
    """

    begin: int
    end: int
    num_seqs: int
    block_ids: torch.Tensor
    num_keys: int
    num_unseen: int = 0
    is_causal: bool = False
    mask: torch.Tensor | None = None
    stale_slots: torch.Tensor | None = None


class Span(NamedTuple):
    """New tokens of one sequence: packed at [begin, begin + num_tokens), positions from start on. row: its table's."""

    row: int
    begin: int
    start: int
    num_tokens: int


def _no_blocks() -> npt.NDArray[np.int32]:
    return np.zeros((0, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What one group's layers do in a step.

    slot_mapping: the slot of each token of the packed batch, [num_tokens] int64.
    calls: cover the packed batch without gaps, in order.
    sequences, block_ids: the same for kernels that read block tables: [sequences, n] int32 on the CPU, each one's
        blocks from position 0 on, as many as the longest has.
    """

    slot_mapping: torch.Tensor
    calls: Sequence[AttentionCall]
    sequences: tuple[Span, ...] = ()
    block_ids: npt.NDArray[np.int32] = field(default_factory=_no_blocks)


class AttentionContext(Protocol):
    """What `paged_context` must do: one layer's attention. states: for the recurrent layers, if the model has any."""

    @property
    def states(self) -> StateContext | None: ...

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PagedContext:
    """One step: where new keys and values go, and who reads what.

    layers: a module's `layer_idx` -> its layer in the pool.
    groups: by number, as the pool's layers name them.
    states: what the recurrent layers read and write; None if there are none.
    """

    cache: KVCache
    layers: Mapping[int, int]
    groups: tuple[GroupInputs, ...]
    states: StateContext | None = None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Query [1, heads, num_tokens, key_dim], key and value [1, kv_heads, num_tokens, dim].

        softcap: scores become `softcap * tanh(scores / softcap)`.
        s_aux: [heads], one more score per head that takes probability and adds nothing.
        Returns [1, num_tokens, heads, value_dim].
        """
        layer = self.layers[module.layer_idx]  # type: ignore[index]
        group = self.groups[self.cache.layers[layer].group]
        self.cache.write(layer, group.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
        output: torch.Tensor | None = None
        for call in group.calls:
            keys, values = self._gather(layer, call, query.dtype)
            # [heads, tokens, dim] -> [num_seqs, heads, new tokens each, dim]
            mine = query[0, :, call.begin : call.end]
            queries = mine.view(mine.shape[0], call.num_seqs, -1, mine.shape[2]).transpose(0, 1)
            if softcap is None and s_aux is None:
                result = F.scaled_dot_product_attention(
                    queries,
                    keys,
                    values,
                    attn_mask=call.mask,
                    is_causal=call.is_causal,
                    scale=scaling,
                    enable_gqa=queries.shape[1] != keys.shape[1],
                )
            else:
                result = _explicit_attention(queries, keys, values, call, scaling, softcap, s_aux)
            tokens = result.transpose(1, 2).flatten(0, 1)  # [tokens, heads, value_dim]
            if len(group.calls) == 1:
                return tokens.unsqueeze(0)
            if output is None:
                output = tokens.new_empty((1, query.shape[2], *tokens.shape[1:]))
            output[0, call.begin : call.end] = tokens
        if output is None:
            raise ValueError("a step needs at least one call")
        return output

    def _gather(self, layer: int, call: AttentionCall, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a call, [num_seqs, kv_heads, num_keys, dim] each."""
        keys, values = self.cache.read(layer, call.block_ids)
        if call.stale_slots is not None:
            keys.index_fill_(0, call.stale_slots, 0)
            values.index_fill_(0, call.stale_slots, 0)
        return _by_sequence(keys, call).to(dtype), _by_sequence(values, call).to(dtype)


def _by_sequence(rows: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    by_sequence = rows.view(call.num_seqs, -1, *rows.shape[1:])
    return by_sequence[:, call.num_unseen : call.num_unseen + call.num_keys].transpose(1, 2)


def _explicit_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: AttentionCall,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what the fused call lacks. Shapes as there; scores and probabilities are float32."""
    num_seqs, num_heads, num_queries, dim = queries.shape
    per_kv_head = num_heads // keys.shape[1]
    grouped = queries.reshape(num_seqs, -1, per_kv_head, num_queries, dim)  # heads: [kv_heads, per_kv_head]
    scores = (grouped @ keys.unsqueeze(2).transpose(3, 4)).float() * (dim**-0.5 if scaling is None else scaling)
    scores = scores.flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if call.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    elif call.mask is not None:
        scores = scores + call.mask
    if sinks is not None:
        column = sinks.float().view(1, num_heads, 1, 1).expand(num_seqs, -1, num_queries, 1)
        probabilities = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probabilities = scores.softmax(dim=-1)
    weights = probabilities.to(values.dtype).view(num_seqs, -1, per_kv_head, *probabilities.shape[2:])
    return (weights @ values.unsqueeze(2)).flatten(1, 2)


def dispatch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    paged_context: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that `transformers` calls for each layer."""
    if paged_context is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not get the keyword arguments of the model's forward, so it cannot reach "
            "the paged K/V pool; use a model whose `transformers` class passes them on to its attention"
        )
    return paged_context.attend(module, query, key, value, attention_mask=attention_mask, **kwargs), None


# `transformers` keeps one registry of attention functions per process; ours has no state, so engines share it safely.
AttentionInterface.register(ATTENTION_NAME, dispatch)
