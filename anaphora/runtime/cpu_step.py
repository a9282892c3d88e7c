"""Steps of few tokens through the CPU kernels: addresses of weights and pool, buffers, threads.

Knows a recognised decoder, the pool and the kernels; knows nothing of plans. Addresses are taken anew at every step, so
what is done to the weights between steps is seen. Imports Numba: import it only where that may be absent.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from anaphora.core.groups import AttentionKind, FullAttention
from anaphora.core.ids import cdiv
from anaphora.runtime.addresses import WeightAddresses, linear_parts
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.chunks import cut_into_chunks
from anaphora.runtime.crowding import Crowding
from anaphora.runtime.decoder import Decoder, GatedMlp, NotRecognisedError, Rotations, num_half_bytes, shape
from anaphora.runtime.decoder import tensor as _tensor
from anaphora.runtime.kernels import barrier, step, tiles
from anaphora.runtime.kernels.attention import CHUNK_TOKENS
from anaphora.runtime.lora.addresses import LowRankTables
from anaphora.runtime.lora.context import AdapterContext
from anaphora.runtime.threads import ThreadTeam

TILE_MULTIPLE = 32
"""Every size along which the tile unit sums must be a multiple of this; vectors take any, and heads of 16, 32, ... ."""

# Up to where a step of the kernels takes less time than one of torch: measured, see docs/log.md.
MAX_TOKENS = {torch.bfloat16: 8, torch.float32: 16}
MAX_TOKENS_TILES = 256
MAX_TOKENS_ADAPTERS = 16  # every thread multiplies all tokens with the narrow halves of adapters

# Up to where vectors, which read a weight in the order in which it lies, take less time than tiles: measured as well. A
# token alone in its step and the same token in company differ by rounding then, so a reproducible step has none.
MAX_TOKENS_VECTORS = 1


class CpuStep:
    """Runs steps of few tokens of one decoder, with as many threads as torch has, or fewer while the cores are busy.

    kinds: what the layers of each group see.
    reproducible_tokens: None, or how many tokens a step has at most, each of which gets the same bits whatever else is
        in the step: no way is then chosen by how many tokens there are.
    max_tokens: beyond them torch's matrix products are the faster ones, or the buffers end.
    Raises NotRecognisedError if the kernels cannot run this decoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_heads: int,
        num_kv_heads: int,
        kinds: Sequence[AttentionKind] = (FullAttention(),),
        *,
        reproducible_tokens: int | None = None,
    ) -> None:
        mlp = decoder.layers[0].mlp
        if not isinstance(mlp, GatedMlp):
            raise NotRecognisedError(f"its MLP is a {type(mlp).__name__}")
        self._mlp_size, self._hidden_size = shape(mlp.gate)
        self._vocab_size = shape(decoder.head)[0]
        self._dtype = _tensor(decoder.norm.parameters).dtype
        self.codes, self.head_codes = _codes(decoder)
        self._decoder = decoder
        self._kinds = tuple(kinds)
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self.numbers = _numbers(decoder)
        self.addresses = WeightAddresses(decoder)
        self._check(decoder)
        sizes = (self._hidden_size, self._mlp_size, decoder.head_dim)
        in_tiles = self._dtype == torch.bfloat16 and not any(size % TILE_MULTIPLE for size in sizes)
        self._use_tiles = in_tiles and step.has_tile_unit() and tiles_allowed()
        self.max_tokens = MAX_TOKENS_TILES if self._use_tiles else MAX_TOKENS[self._dtype]
        self._vector_tokens = MAX_TOKENS_VECTORS
        if reproducible_tokens is not None:
            self.max_tokens, self._vector_tokens = reproducible_tokens, 0
        self._element = (0,) * self._dtype.itemsize
        self._head_dim = (0,) * (decoder.head_dim // 16)
        self._configuration = np.frombuffer(tiles.configuration(), dtype=np.uint8)
        self._configuration_address = self._configuration.ctypes.data if self._use_tiles else 0
        attention_size = num_heads * decoder.head_dim
        largest = cdiv(max(self._hidden_size, self._mlp_size, attention_size), 16) * 16
        widest = max((num_heads + 2 * num_kv_heads) * decoder.head_dim, 2 * self._mlp_size, self._hidden_size)
        num_rows = cdiv(self.max_tokens, 16) * 16
        has_codes = bool(self.codes or self.head_codes)
        self._own_size = step.own_bytes(
            num_rows, self._hidden_size, largest, decoder.head_dim, self._dtype.itemsize, has_codes=has_codes
        )
        self._shared = _aligned(num_rows * largest * self._dtype.itemsize)
        self._queries = _aligned(self.max_tokens * attention_size * 4)
        self._buffers = np.zeros(step.B_BARRIER + 1, dtype=np.int64)
        self._buffers[[step.B_SHARED, step.B_QUERIES]] = self._shared.ctypes.data, self._queries.ctypes.data
        self._wide = _rows(num_rows, widest)
        self._words = _rows(num_rows, self._vocab_size)
        self._partials = _Partials(num_heads, decoder.head_dim)
        self._low_rank = LowRankTables(decoder)
        self._take_threads(torch.get_num_threads())

    def _take_threads(self, count: int) -> None:
        self._team = ThreadTeam(count, barrier.BARRIER_SIZE)
        self._crowding = Crowding(count)
        self._own = _aligned(count * self._own_size)
        self._own_address = self._own.ctypes.data
        self._buffers[step.B_BARRIER] = self._team.barrier.ctypes.data
        self._scores = np.zeros((count, self._num_heads // self._num_kv_heads * CHUNK_TOKENS), dtype=np.float32)

    def _check(self, decoder: Decoder) -> None:
        if self._dtype not in (torch.bfloat16, torch.float32):
            raise NotRecognisedError(f"its weights are {self._dtype}")
        if decoder.head_dim % 16 or decoder.head_dim > 256:
            raise NotRecognisedError(f"its heads, of {decoder.head_dim}, are no multiple of 16 up to 256")
        queries, keys = (count * decoder.head_dim for count in (self._num_heads, self._num_kv_heads))
        hidden, inner = self._hidden_size, self._mlp_size
        for layer in decoder.layers:
            mlp: Any = layer.mlp  # that it is a gated one, `_numbers` has seen
            parts = (layer.query, layer.key, layer.value, layer.output, mlp.gate, mlp.up, mlp.down)
            shapes = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
            for part, size in zip(parts, (*shapes, (inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
                weight = _tensor(part)
                dtype = torch.uint8 if self.codes else self._dtype
                if shape(part) != size or weight.dtype != dtype or not weight.is_contiguous():
                    raise NotRecognisedError("its layers' weights are not of the same sizes and dtype")

    def takes(self, num_tokens: int, context: object, adapters: AdapterContext | None = None) -> bool:
        """Whether this step is one for the kernels."""
        most = self.max_tokens if adapters is None else min(self.max_tokens, MAX_TOKENS_ADAPTERS)
        return (
            num_tokens <= most
            and (adapters is None or self._low_rank.takes(adapters))
            and isinstance(context, PagedContext)
            and context.cache.keys[0].dtype == self._dtype
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        rotations: Rotations,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: PagedContext,
        adapters: AdapterContext | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [len(keep), vocab] and final hidden states [T, hidden] of embeddings [T, hidden]; overwrites these."""
        return self._run(range(len(self._decoder.layers)), hidden, rotations, position_ids, keep, context, adapters)

    def run_layer(
        self,
        number: int,
        hidden: torch.Tensor,
        rotations: Rotations,
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
        rotations: Rotations,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: PagedContext,
        adapters: AdapterContext | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.get_num_threads() != self._team.num_threads:
            self._take_threads(torch.get_num_threads())
        num_tokens = hidden.shape[0]
        cache = context.cache
        positions = position_ids[0].numpy()
        chunks = cut_into_chunks(context.groups, self._kinds, positions, cache.block_size, CHUNK_TOKENS)
        row_bytes = self._num_kv_heads * self._decoder.head_dim * self._dtype.itemsize
        addresses, final = self.addresses.now(context)
        layers = slice(numbers.start, numbers.stop)
        # Rows of those layers and the last one, which is that of norm and head.
        and_last = slice(None) if len(numbers) == len(addresses) else [*numbers, -1]
        cos, sin = (torch.stack(parts).float().numpy() for parts in zip(*rotations, strict=True))
        self._partials.grow(int(chunks.token_partials[:, -1].max()))
        low_rank, owners, rank = self._low_rank.of_step(adapters)
        narrow = np.empty((self._team.num_threads, 3, len(owners), rank), dtype=np.float32)
        normed = torch.empty_like(hidden)
        logits = hidden.new_empty((keep.shape[0], self._vocab_size))
        sizes = [num_tokens, self._hidden_size, self._num_heads, self._num_kv_heads, self._mlp_size, self._vocab_size]
        use_tiles = self._use_tiles and num_tokens > self._vector_tokens
        team, num_threads = self._team, self._crowding.num_threads
        of_step = hidden.data_ptr(), normed.data_ptr(), logits.data_ptr()
        self._buffers[[step.B_HIDDEN, step.B_NORMED, step.B_LOGITS]] = of_step
        arguments: tuple[Any, ...] = (
            num_threads, addresses[layers], self.addresses.scales[and_last],
            np.array([*sizes, use_tiles], dtype=np.int64),
            self.numbers[and_last], cos, sin, np.stack([group.slot_mapping.numpy() for group in context.groups]),
            chunks.groups, chunks.work, chunks.items, chunks.slots * row_bytes, chunks.tokens, chunks.first,
            chunks.visible, chunks.partials, chunks.token_partials, keep.numpy(), final,
            self._buffers, self._own_address, self._own_size, self._configuration_address, self._wide, self._words,
            self._scores, self._partials.tops, self._partials.sums, self._partials.values, low_rank, owners, narrow,
            self._head_dim, self._element, self.codes, self.head_codes,
        )  # fmt: skip
        share = team.run(lambda thread: step.run_step(thread, *arguments), self._abandon, num_threads)
        self._crowding.note(share)
        return logits, normed

    def _abandon(self) -> None:
        self._team.barrier[barrier.ABANDONED] = 1


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


def _numbers(decoder: Decoder) -> npt.NDArray[np.float32]:
    """See step.run_step. Raises NotRecognisedError."""
    table = np.zeros((len(decoder.layers) + 1, step.NUM_NUMBERS), dtype=np.float32)
    for row, layer in zip(table, decoder.layers, strict=False):
        norms = (layer.input_norm, layer.query_norm, layer.key_norm, layer.attention_norm, layer.mlp_norm)
        for column, norm in zip(range(0, 12, 2), (*norms, layer.mlp_out_norm), strict=True):
            if norm is not None:
                row[column : column + 2] = norm.eps, norm.offset
        row[step.N_SCALE], row[step.N_SOFT_CAP] = layer.scaling, layer.soft_cap or 0
        if not isinstance(layer.mlp, GatedMlp):
            raise NotRecognisedError(f"its MLP is a {type(layer.mlp).__name__}")
        row[step.N_GATE_LINEAR], row[step.N_GATE_CUBIC] = _gate(layer.mlp.activation)
    table[-1, :2] = decoder.norm.eps, decoder.norm.offset
    table[-1, step.N_SOFT_CAP] = decoder.soft_cap or 0
    return table


def _codes(decoder: Decoder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the layers' weights are, and the head's; see kernels.code_layout. Raises NotRecognisedError."""
    kinds = {num_half_bytes(linear) for layer in decoder.layers for _, linear in linear_parts(layer)}
    if len(kinds) != 1:
        raise NotRecognisedError("some of its layers are quantised and some are not")
    return (0,) * kinds.pop(), (0,) * num_half_bytes(decoder.head)


def _gate(activation: torch.nn.Module) -> tuple[float, float]:
    """Factors of an activation x × sigmoid(a × x + b × x³). Raises NotRecognisedError if it is another one."""
    sample = torch.linspace(-9, 9, 64)
    slope = 2 * math.sqrt(2 / math.pi)
    for linear, cubic in ((1.0, 0.0), (slope, 0.044715 * slope)):
        expected = sample * torch.sigmoid(linear * sample + cubic * sample**3)
        if torch.allclose(activation(sample), expected, atol=1e-6):
            return linear, cubic
    raise NotRecognisedError("its activation is neither SiLU nor GELU in its tanh form")
