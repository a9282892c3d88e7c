"""Steps of few tokens through the CPU kernels: addresses of weights and pool, buffers, threads.

Knows a recognised decoder, the pool and the kernels; knows nothing of plans. Addresses are taken anew at every step, so
what is done to the weights between steps is seen. Imports Numba: import it only where that may be absent.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from anaphora.core.ids import cdiv
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.chunks import cut_into_chunks
from anaphora.runtime.decoder import Decoder, DecoderLayer, NotRecognisedError, Parameters
from anaphora.runtime.kernels import barrier, step, tiles
from anaphora.runtime.kernels.attention import CHUNK_TOKENS, TILE_QUERIES
from anaphora.runtime.threads import ThreadTeam

ALIGNMENT_BYTES = 64
"""Every size along which a kernel sums must be a multiple of this many bytes of elements."""

# Up to where a step of the kernels takes less time than one of torch: measured, see docs/log.md.
MAX_TOKENS = {torch.bfloat16: 8, torch.float32: 16}
MAX_TOKENS_TILES = 256


class CpuStep:
    """Runs steps of few tokens of one decoder, with as many threads as torch has.

    reproducible_tokens: None, or how many tokens a step has at most, each of which gets the same bits whatever else is
        in the step: attention then never chooses its way by how many queries share a chunk.
    max_tokens: beyond them torch's matrix products are the faster ones, or the buffers end.
    Raises NotRecognisedError if the kernels cannot run this decoder.
    """

    def __init__(
        self, decoder: Decoder, num_heads: int, num_kv_heads: int, *, reproducible_tokens: int | None = None
    ) -> None:
        weight = _tensor(decoder.layers[0].gate)
        self._mlp_size, self._hidden_size = weight.shape
        self._vocab_size = _tensor(decoder.head).shape[0]
        self._dtype = weight.dtype
        self._decoder = decoder
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._check(decoder)
        self._use_tiles = self._dtype == torch.bfloat16 and step.has_tile_unit() and tiles_allowed()
        self.max_tokens = MAX_TOKENS_TILES if self._use_tiles else MAX_TOKENS[self._dtype]
        self._tile_queries = TILE_QUERIES
        if reproducible_tokens is not None:
            self.max_tokens, self._tile_queries = reproducible_tokens, 1
        self._element = (0,) * self._dtype.itemsize
        self._head_dim = (0,) * (decoder.head_dim // 16)
        self._configuration = np.frombuffer(tiles.configuration(), dtype=np.uint8)
        attention_size = num_heads * decoder.head_dim
        largest = max(self._hidden_size, self._mlp_size, attention_size)
        widest = max((num_heads + 2 * num_kv_heads) * decoder.head_dim, 2 * self._mlp_size)
        num_rows = cdiv(self.max_tokens, 16) * 16
        self._own_size = step.own_bytes(num_rows, self._hidden_size, largest, decoder.head_dim, self._dtype.itemsize)
        self._shared = _aligned(num_rows * largest * self._dtype.itemsize)
        self._queries = _aligned(self.max_tokens * attention_size * 4)
        self._wide = _rows(num_rows, widest)
        self._words = _rows(num_rows, self._vocab_size)
        self._partials = _Partials(num_heads, decoder.head_dim)
        norms = [(la.input_norm, la.query_norm, la.key_norm, la.mlp_norm) for la in decoder.layers]
        self._eps = np.array(
            [[0.0 if norm is None else norm.eps for norm in four] for four in norms] + [[decoder.norm.eps] * 4],
            dtype=np.float32,
        )
        self._take_threads(torch.get_num_threads())

    def _take_threads(self, count: int) -> None:
        self._team = ThreadTeam(count, barrier.BARRIER_SIZE)
        self._own = _aligned(count * self._own_size)
        self._scores = np.zeros((count, self._num_heads // self._num_kv_heads * CHUNK_TOKENS), dtype=np.float32)

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
        """Logits [len(keep), vocab] and final hidden states [T, hidden] of embeddings [T, hidden]; overwrites these."""
        return self._run(range(len(self._decoder.layers)), hidden, rotations, position_ids, keep, context)

    def run_layer(
        self,
        number: int,
        hidden: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        position_ids: torch.Tensor,
        context: PagedContext,
    ) -> torch.Tensor:
        """Hidden states after one layer, in the memory of those before it."""
        nothing = torch.empty(0, dtype=torch.int64)
        self._run(range(number, number + 1), hidden, rotations, position_ids, nothing, context)
        return hidden

    def _run(
        self,
        numbers: range,
        hidden: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: PagedContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.get_num_threads() != self._team.num_threads:
            self._take_threads(torch.get_num_threads())
        num_tokens = hidden.shape[0]
        cache = context.cache
        (group,) = context.groups
        chunks = cut_into_chunks(group.calls, position_ids[0].numpy(), cache.block_size, CHUNK_TOKENS)
        row_bytes = self._num_kv_heads * self._decoder.head_dim * self._dtype.itemsize
        addresses = np.array(
            [self.addresses(self._decoder.layers[number], context) for number in numbers], dtype=np.int64
        )
        final = [_address(self._decoder.norm.parameters), _address(self._decoder.head), _bias(self._decoder.head)]
        cos, sin = (part.float().contiguous().numpy() for part in rotations)
        self._partials.grow(int(chunks.token_partials[-1]))
        normed = torch.empty_like(hidden)
        logits = hidden.new_empty((keep.shape[0], self._vocab_size))
        sizes = [num_tokens, self._hidden_size, self._num_heads, self._num_kv_heads, self._mlp_size, self._vocab_size]
        team = self._team
        buffers = [
            hidden.data_ptr(), self._shared.ctypes.data, self._queries.ctypes.data, normed.data_ptr(),
            logits.data_ptr(), team.barrier.ctypes.data,
        ]  # fmt: skip
        arguments: tuple[Any, ...] = (
            team.num_threads, addresses, np.array([*sizes, self._use_tiles, self._tile_queries], dtype=np.int64),
            self._eps[[*numbers, -1]],
            np.float32(self._decoder.layers[0].scaling), cos, sin, group.slot_mapping.numpy(), chunks.items,
            chunks.slots * row_bytes, chunks.tokens, chunks.visible, chunks.partials, chunks.token_partials,
            keep.numpy(), np.array(final, dtype=np.int64), np.array(buffers, dtype=np.int64), self._own.ctypes.data,
            self._own_size, self._configuration.ctypes.data, self._wide, self._words, self._scores, self._partials.tops,
            self._partials.sums, self._partials.values, self._head_dim, self._element,
        )  # fmt: skip
        team.run(lambda thread: step.run_step(thread, *arguments), self._abandon)
        return logits, normed

    def _abandon(self) -> None:
        self._team.barrier[barrier.ABANDONED] = 1

    def addresses(self, layer: DecoderLayer, context: PagedContext) -> list[int]:
        """A layer's row of the kernels' table of addresses."""
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


def tiles_allowed() -> bool:
    """Ask the system for the tile unit, which Linux grants to a process on demand. False: there is none."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    request_permission, tile_data, system_call = 0x1023, 18, 158  # arch_prctl
    return bool(ctypes.CDLL(None).syscall(system_call, request_permission, tile_data) == 0)


def _aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that begin where a cache line does."""
    raw = np.zeros(num_bytes + 64, dtype=np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + num_bytes]


def _rows(count: int, size: int) -> npt.NDArray[np.float32]:
    """Rows of float32 that begin in different sets of the cache. The system gives memory as they are written."""
    stride = cdiv(size, 16) * 16 + 16
    return _aligned(count * stride * 4).view(np.float32).reshape(count, stride)


class _Partials:
    """Room for partial results, larger when a step needs it."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self.tops = np.zeros((1, num_heads), dtype=np.float32)
        self.sums = np.zeros((1, num_heads), dtype=np.float32)
        self.values = np.zeros((1, num_heads, head_dim), dtype=np.float32)

    def grow(self, count: int) -> None:
        if count > len(self.tops):
            count = 1 << (count - 1).bit_length()
            self.tops = np.zeros((count, *self.tops.shape[1:]), dtype=np.float32)
            self.sums = np.zeros((count, *self.sums.shape[1:]), dtype=np.float32)
            self.values = np.zeros((count, *self.values.shape[1:]), dtype=np.float32)


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
