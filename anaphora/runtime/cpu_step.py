"""Steps of few tokens through the CPU kernels: addresses of weights and pool, buffers, threads.

Knows a recognised decoder, the pool and the kernels; knows nothing of plans. Addresses are taken anew at every step, so
what is done to the weights between steps is seen. Imports Numba: import it only where that may be absent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from anaphora.runtime.attention import PagedContext
from anaphora.runtime.chunks import cut_into_chunks
from anaphora.runtime.decoder import Decoder, DecoderLayer, NotRecognisedError, Parameters
from anaphora.runtime.kernels import barrier, step
from anaphora.runtime.kernels.attention import CHUNK_TOKENS
from anaphora.runtime.threads import ThreadTeam

ALIGNMENT_BYTES = 64
"""Every size along which a kernel sums must be a multiple of this many bytes of elements."""


class CpuStep:
    """Runs steps of up to max_tokens tokens of one decoder. Raises NotRecognisedError if the kernels cannot."""

    def __init__(self, decoder: Decoder, num_heads: int, num_kv_heads: int, max_tokens: int, num_threads: int) -> None:
        first = decoder.layers[0]
        weight = _tensor(first.gate)
        self._mlp_size, self._hidden_size = weight.shape
        self._vocab_size = _tensor(decoder.head).shape[0]
        self._dtype = weight.dtype
        self.max_tokens = max_tokens
        self._check(decoder)
        self._decoder = decoder
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._element = (0,) * self._dtype.itemsize
        self._head_dim = (0,) * (decoder.head_dim // 16)
        self._team = ThreadTeam(num_threads, barrier.BARRIER_SIZE)
        attention_size = num_heads * decoder.head_dim
        operand = max(self._hidden_size, self._mlp_size, attention_size)
        widest = max((num_heads + 2 * num_kv_heads) * decoder.head_dim, 2 * self._mlp_size, self._vocab_size)
        self._x = np.zeros(((num_threads + 1) * max_tokens * operand), dtype=np.float32)
        self._queries = np.zeros(max_tokens * attention_size, dtype=np.float32)
        self._wide = np.zeros((max_tokens, widest), dtype=np.float32)
        group = num_heads // num_kv_heads
        self._scores = np.zeros((num_threads, group * CHUNK_TOKENS), dtype=np.float32)
        self._partials = _Partials(num_heads, decoder.head_dim)
        norms = [(la.input_norm, la.query_norm, la.key_norm, la.mlp_norm) for la in decoder.layers]
        self._eps = np.array(
            [[0.0 if norm is None else norm.eps for norm in four] for four in norms] + [[decoder.norm.eps] * 4],
            dtype=np.float32,
        )

    def _check(self, decoder: Decoder) -> None:
        sample = torch.linspace(-9, 9, 64)
        for layer in decoder.layers:
            if not torch.allclose(layer.activation(sample), F.silu(sample), atol=1e-6):
                raise NotRecognisedError("its activation is not SiLU")
        if self._dtype not in (torch.bfloat16, torch.float32):
            raise NotRecognisedError(f"its weights are {self._dtype}")
        if len({layer.scaling for layer in decoder.layers}) != 1:
            raise NotRecognisedError("its layers scale scores differently")
        numbers = ALIGNMENT_BYTES // self._dtype.itemsize
        if any(size % numbers for size in (self._hidden_size, self._mlp_size, decoder.head_dim)):
            raise NotRecognisedError(f"its sizes are no multiples of {numbers}")
        if decoder.head_dim > 256:
            raise NotRecognisedError("its heads are longer than 256")

    def takes(self, num_tokens: int, context: object) -> bool:
        """Whether this step is one for the kernels."""
        return (
            num_tokens <= self.max_tokens
            and isinstance(context, PagedContext)
            and context.cache.keys[0].dtype == self._dtype
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: PagedContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [len(keep), vocab] and final hidden states [T, hidden] from embeddings [T, hidden], which it overwrites."""
        num_tokens = hidden.shape[0]
        cache = context.cache
        chunks = cut_into_chunks(context.groups, position_ids[0].numpy(), cache.block_size, CHUNK_TOKENS)
        row_bytes = self._num_kv_heads * self._decoder.head_dim * self._dtype.itemsize
        addresses = np.array(
            [self._addresses(layer, context) for layer in self._decoder.layers], dtype=np.int64
        )
        final = [_address(self._decoder.norm.parameters), _address(self._decoder.head), _bias(self._decoder.head)]
        cos, sin = (part.float().contiguous().numpy() for part in rotations)
        self._partials.grow(int(chunks.token_partials[-1]))
        normed = torch.empty_like(hidden)
        logits = hidden.new_empty((keep.shape[0], self._vocab_size))
        sizes = [num_tokens, self._hidden_size, self._num_heads, self._num_kv_heads, self._mlp_size, self._vocab_size]
        team = self._team
        barrier_at = team.barrier.ctypes.data
        arguments: tuple[Any, ...] = (
            team.num_threads, barrier_at, addresses, np.array(sizes, dtype=np.int64), self._eps,
            np.float32(self._decoder.layers[0].scaling), cos, sin, context.slot_mapping.numpy(), chunks.items,
            chunks.slots * row_bytes, chunks.tokens, chunks.visible, chunks.partials, chunks.token_partials,
            keep.numpy(), np.array(final, dtype=np.int64), hidden.data_ptr(), self._x.ctypes.data,
            self._queries.ctypes.data, self._wide, self._scores, self._partials.tops, self._partials.sums,
            self._partials.values, normed.data_ptr(), logits.data_ptr(), self._head_dim, self._element,
        )  # fmt: skip
        team.run(lambda thread: step.run_step(thread, *arguments), self._abandon)
        return logits, normed

    def _abandon(self) -> None:
        self._team.barrier[barrier.ABANDONED] = 1

    def _addresses(self, layer: DecoderLayer, context: PagedContext) -> list[int]:
        pool = context.layers[layer.attention.layer_idx]  # type: ignore[index]
        query_norm, key_norm = layer.query_norm, layer.key_norm
        linears = (layer.query, layer.key, layer.value, layer.output)
        mlp = (layer.gate, layer.up, layer.down)
        return [
            _address(layer.input_norm.parameters),
            *(pointer for part in linears for pointer in (_address(part), _bias(part))),
            0 if query_norm is None else _address(query_norm.parameters),
            0 if key_norm is None else _address(key_norm.parameters),
            _address(layer.mlp_norm.parameters),
            *(pointer for part in mlp for pointer in (_address(part), _bias(part))),
            context.cache.keys[pool].data_ptr(),
            context.cache.values[pool].data_ptr(),
        ]


class _Partials:
    """Room for partial results, larger when a step needs it."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self._num_heads, self._head_dim = num_heads, head_dim
        self.grow(1, first=True)

    def grow(self, count: int, first: bool = False) -> None:
        if first or count > len(self.tops):
            count = 1 << (count - 1).bit_length()
            self.tops = np.zeros((count, self._num_heads), dtype=np.float32)
            self.sums = np.zeros((count, self._num_heads), dtype=np.float32)
            self.values = np.zeros((count, self._num_heads, self._head_dim), dtype=np.float32)


def _tensor(parameters: Parameters) -> torch.Tensor:
    weight = parameters["weight"]
    if weight is None:
        raise NotRecognisedError("a weight is missing")
    return weight


def _address(parameters: Parameters) -> int:
    return _tensor(parameters).data_ptr()


def _bias(parameters: Parameters) -> int:
    bias = parameters.get("bias")
    return 0 if bias is None else bias.data_ptr()
