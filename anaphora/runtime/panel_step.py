"""Steps of many tokens through the CPU's tile unit: addresses of weights and pool, panels, who attends to what.

Knows a recognised decoder, the pool and the kernels; knows nothing of plans. Addresses are taken anew at every step, so
what is done to the weights between steps is seen. Imports Numba: import it only where that may be absent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from anaphora.core.groups import AttentionKind, FullAttention
from anaphora.core.ids import cdiv
from anaphora.runtime.addresses import linear_parts
from anaphora.runtime.attention import AttentionCall, PagedContext
from anaphora.runtime.cpu_step import CpuStep, tiles_allowed
from anaphora.runtime.decoder import (
    Decoder,
    DecoderLayer,
    GatedMlp,
    NotRecognisedError,
    Rotations,
    normalise,
    num_half_bytes,
    shape,
    tensor,
)
from anaphora.runtime.kernels import barrier, panel_step, step, tiles
from anaphora.runtime.kernels.codes import unpack_matrices
from anaphora.runtime.kernels.panel_attention import CHUNK_TOKENS, chunk_bytes, result_bytes
from anaphora.runtime.kernels.panels import PANEL_TOKENS
from anaphora.runtime.lora.context import AdapterContext
from anaphora.runtime.threads import ThreadTeam

Int64 = npt.NDArray[np.int64]

# A step of at least MIN_TOKENS, and at least MIN_MEAN_TOKENS for each sequence, takes less time than one of CpuStep,
# which reads the keys that several sequences share only once, and wastes no lanes on short ones: see docs/log.md.
MIN_TOKENS = 24
MIN_MEAN_TOKENS = 8

# A step of up to so many panels is shared out by outputs, a longer one by panels.
MOST_PANELS_BY_OUTPUTS = 16


class PanelStep:
    """Runs steps of many tokens of one decoder in bfloat16, with as many threads as torch has.

    max_tokens: as many as there is memory for.
    kinds: what the layers of each group see.
    few_tokens: the kernels for the same decoder's other steps, which know where its weights are.
    Raises NotRecognisedError if this CPU or this decoder is not for it.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_heads: int,
        num_kv_heads: int,
        few_tokens: CpuStep,
        kinds: Sequence[AttentionKind] = (FullAttention(),),
    ) -> None:
        self.max_tokens = sys.maxsize
        mlp = decoder.layers[0].mlp
        if not isinstance(mlp, GatedMlp):
            raise NotRecognisedError(f"its MLP is a {type(mlp).__name__}")
        if tensor(decoder.norm.parameters).dtype != torch.bfloat16:
            raise NotRecognisedError("its weights are not bfloat16")
        if more := _more_than_a_llama(decoder, mlp, kinds):
            raise NotRecognisedError(f"it has {more}")
        if not (step.has_tile_unit() and tiles_allowed()):
            raise NotRecognisedError("this CPU has no tile unit for bfloat16")
        self._codes = (0,) * num_half_bytes(mlp.gate)
        self._mlp_size, self._hidden_size = shape(mlp.gate)
        self._decoder, self._few_tokens = decoder, few_tokens
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._configuration = np.frombuffer(tiles.configuration(), dtype=np.uint8)
        norms = [(la.input_norm, la.query_norm, la.key_norm, la.mlp_norm) for la in decoder.layers]
        self._eps = np.array([[0.0 if norm is None else norm.eps for norm in four] for four in norms], np.float32)
        self._team = ThreadTeam(torch.get_num_threads(), barrier.BARRIER_SIZE)
        self._own = torch.empty(0, dtype=torch.uint8)
        self._unpacked = torch.empty(0, dtype=torch.bfloat16)

    def takes(self, num_tokens: int, context: object, adapters: AdapterContext | None = None) -> bool:
        """Whether this step is one for the tile unit. None with adapters is."""
        if adapters is not None or num_tokens < MIN_TOKENS or not isinstance(context, PagedContext):
            return False
        num_seqs = sum(call.num_seqs for call in context.groups[0].calls)
        is_for_few = num_tokens <= self._few_tokens.max_tokens and num_tokens < MIN_MEAN_TOKENS * num_seqs
        return not is_for_few and context.cache.keys[0].dtype == torch.bfloat16

    def __call__(
        self,
        hidden: torch.Tensor,
        rotations: Rotations,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: PagedContext,
        adapters: AdapterContext | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [len(keep), vocab] and final hidden states [T, hidden] of embeddings [T, hidden]."""
        last = self._run(range(len(self._decoder.layers)), hidden, rotations, position_ids, context)
        normed = normalise(last, self._decoder.norm)
        return self._decoder.logits(normed.index_select(0, keep)), normed

    def run_layer(
        self,
        number: int,
        hidden: torch.Tensor,
        rotations: Rotations,
        position_ids: torch.Tensor,
        context: PagedContext,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], whatever T."""
        return self._run(range(number, number + 1), hidden, rotations, position_ids, context)

    def _run(
        self,
        numbers: range,
        hidden: torch.Tensor,
        rotations: Rotations,
        position_ids: torch.Tensor,
        context: PagedContext,
    ) -> torch.Tensor:
        if torch.get_num_threads() != self._team.num_threads:
            self._team = ThreadTeam(torch.get_num_threads(), barrier.BARRIER_SIZE)
        team, (group,), dim = self._team, context.groups, self._decoder.head_dim
        num_tokens = hidden.shape[0]
        row_bytes = self._num_kv_heads * dim * 2
        readers = find_readers(
            group.calls,
            position_ids[0].numpy(),
            context.cache.block_size,
            row_bytes,
            self._num_kv_heads,
            team.num_threads,
        )
        own_size = panel_step.own_bytes(
            self._hidden_size,
            self._mlp_size,
            dim,
            readers.most_items * self._num_heads // self._num_kv_heads * result_bytes(dim),
        )
        own_size = cdiv(own_size, 64) * 64
        if self._own.numel() < team.num_threads * own_size:
            self._own = torch.zeros(team.num_threads * own_size, dtype=torch.uint8)
        panels = _panels(hidden)
        cos, sin = (_panels(part.float()) for part in rotations[0])
        queries = torch.zeros(len(panels) * self._num_heads * dim * PANEL_TOKENS, dtype=torch.bfloat16)
        addresses, _ = self._few_tokens.addresses.now(context)
        addresses = addresses[numbers.start : numbers.stop]
        sizes = [
            num_tokens,
            self._hidden_size,
            self._num_heads,
            self._num_kv_heads,
            self._mlp_size,
            dim,
            chunk_bytes(dim),
        ]
        eps = self._eps[list(numbers)]
        arguments = (
            np.float32(self._decoder.layers[0].scaling), panels.data_ptr(), queries.data_ptr(), cos.data_ptr(),
            sin.data_ptr(), group.slot_mapping.numpy(), readers.rows.ctypes.data, readers.sequences, readers.items,
            readers.units, readers.starts, readers.visible.ctypes.data, team.barrier.ctypes.data,
            self._own.data_ptr(), own_size, self._configuration.ctypes.data,
        )  # fmt: skip

        def run(part: slice) -> None:
            layers = (team.num_threads, addresses[part], np.array(sizes, dtype=np.int64), eps[part])
            team.run(lambda thread: panel_step.run_layers(thread, *layers, *arguments), self._abandon)

        if not self._codes:
            run(slice(None))
        for place, number in enumerate(numbers if self._codes else ()):
            self._unpack(self._decoder.layers[number], addresses[place])
            run(slice(place, place + 1))
        return panels.transpose(1, 2).reshape(-1, hidden.shape[1])[:num_tokens]

    def _unpack(self, layer: DecoderLayer, addresses: Int64) -> None:
        """Make bfloat16 of one layer's codes, in memory that the next layer takes over, and note where they are."""
        matrices = linear_parts(layer)
        size = sum(shape(linear).numel() for _, linear in matrices)
        if self._unpacked.numel() < size:
            self._unpacked = torch.empty(size, dtype=torch.bfloat16)
        begin, table = 0, np.empty((len(matrices), 5), dtype=np.int64)
        for row, (column, linear) in zip(table, matrices, strict=True):
            codes, scales = tensor(linear), linear["scales"]
            if scales is None:
                raise NotRecognisedError("a weight is missing")
            addresses[column] = self._unpacked.data_ptr() + 2 * begin
            row[:] = codes.data_ptr(), scales.data_ptr(), *shape(linear), addresses[column]
            begin += shape(linear).numel()
        num_threads = self._team.num_threads
        self._team.run(lambda thread: unpack_matrices(thread, num_threads, table, self._codes), self._abandon)

    def _abandon(self) -> None:
        self._team.barrier[barrier.ABANDONED] = 1


def _more_than_a_llama(decoder: Decoder, mlp: GatedMlp, kinds: Sequence[AttentionKind]) -> str:
    """What these kernels do not compute and CpuStep does; empty: nothing."""
    sample = torch.linspace(-9, 9, 64)
    for layer in decoder.layers:
        norms = (layer.input_norm, layer.query_norm, layer.key_norm, layer.mlp_norm)
        if layer.attention_norm is not None or layer.mlp_out_norm is not None:
            return "norms of what attention and MLP give"
        if any(norm is not None and norm.offset for norm in norms):
            return "norms whose weights are distances from 1"
        if layer.soft_cap is not None or layer.sinks is not None:
            return "soft caps or sinks"
        if isinstance(layer.mlp, GatedMlp) and not torch.allclose(layer.mlp.activation(sample), F.silu(sample)):
            return "another activation than SiLU"
        if layer.scaling != decoder.layers[0].scaling:
            return "layers that scale scores differently"
    if tuple(kinds) != (FullAttention(),):
        return "layers that do not see every earlier token"
    if len(decoder.layer_types) > 1:
        return "several rotary embeddings"
    sizes = (*shape(decoder.layers[0].output), *shape(mlp.gate), decoder.head_dim)
    if any(size % 32 for size in sizes):
        return "sizes that are no multiples of 32"
    return ""


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads what, for all layers alike; the arrays are those of kernels.panel_step.run_layers.

    most_items: of one unit.
    """

    rows: Int64
    sequences: Int64
    items: Int64
    units: Int64
    starts: Int64
    visible: npt.NDArray[np.int32]
    most_items: int


def find_readers(
    calls: tuple[AttentionCall, ...],
    positions: Int64,
    block_size: int,
    row_bytes: int,
    num_kv_heads: int,
    num_threads: int,
) -> Readers:
    """positions: of each token of the packed batch. row_bytes: of one token in a layer's pool."""
    padded = np.append(positions, np.full(-len(positions) % PANEL_TOKENS, -1)).reshape(-1, PANEL_TOKENS)
    tokens = np.arange(padded.size).reshape(padded.shape)
    rows: list[Int64] = []
    sequences: list[tuple[int, int]] = []
    items: list[tuple[int, int, int]] = []
    seen: list[Int64] = []
    work: list[tuple[int, int, int, int]] = []  # a sequence, a K/V head, an item, its keys
    num_rows = 0
    for call in calls:
        length = (call.end - call.begin) // call.num_seqs
        tables = call.block_ids.numpy().reshape(call.num_seqs, -1).astype(np.int64)
        for table, first in zip(tables, range(call.begin, call.end, length), strict=True):
            end, first_item = first + length, len(items)
            num_keys = int(positions[end - 1]) + 1
            slots = (table[: cdiv(num_keys, block_size), None] * block_size + np.arange(block_size)).ravel()[:num_keys]
            rows.append(np.pad(slots, (0, -num_keys % CHUNK_TOKENS), mode="edge") * row_bytes)
            for panel in range(first // PANEL_TOKENS, cdiv(end, PANEL_TOKENS)):
                inside = (tokens[panel] >= first) & (tokens[panel] < end)
                counts = np.where(inside, padded[panel] + 1, 0)
                items.append((panel, int(counts.min()), int(counts.max())))
                seen.append(counts)
            for head in range(num_kv_heads):
                work += [(len(sequences), head, item, items[item][2]) for item in range(first_item, len(items))]
            sequences.append((num_rows, num_keys))
            num_rows += len(rows[-1])
    units, starts = _share_out(np.array(work, dtype=np.int64), num_threads)
    return Readers(
        rows=np.concatenate(rows),
        sequences=np.array(sequences, dtype=np.int64),
        items=np.array(items, dtype=np.int64),
        units=units,
        starts=starts,
        visible=np.stack(seen).astype(np.int32),
        most_items=int((units[:, 3] - units[:, 2]).max()),
    )


def _share_out(work: Int64, num_threads: int) -> tuple[Int64, Int64]:
    """Units [m, 4] and where each thread's begin: runs of `work`, as even in keys as its items allow.

    work: [n, 4], a sequence, a K/V head, an item, how many keys it reads.
    """
    keys = work[:, 3]
    threads = (2 * np.cumsum(keys) - keys) * num_threads // (2 * keys.sum())
    alike = np.column_stack([work[:, :2], threads])
    begins = np.append(0, 1 + np.flatnonzero((alike[1:] != alike[:-1]).any(axis=1)))
    ends = np.append(begins[1:], len(work))
    units = np.column_stack([work[begins, :3], work[ends - 1, 2] + 1])
    return units, np.searchsorted(threads[begins], np.arange(num_threads + 1))


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """[T, n] -> [panels, n, 16]; behind the last token stand zeros."""
    count = cdiv(len(rows), PANEL_TOKENS)
    padded = rows.new_zeros((count * PANEL_TOKENS, rows.shape[1]))
    padded[: len(rows)] = rows
    return padded.view(count, PANEL_TOKENS, -1).transpose(1, 2).contiguous()
