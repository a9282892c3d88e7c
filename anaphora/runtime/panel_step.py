"""Steps of many tokens through the CPU's tile unit: addresses of weights and pool, panels, memory.

Knows a recognised decoder, the pool and the kernels; knows nothing of plans. Addresses are taken anew at every step, so
what is done to the weights between steps is seen. Imports Numba: import it only where that may be absent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from anaphora.core.groups import AttentionKind, FullAttention
from anaphora.core.ids import cdiv
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.cpu_step import MAX_TOKENS_ADAPTERS, CpuStep, tiles_allowed
from anaphora.runtime.decoder import (
    Decoder,
    GatedMlp,
    NotRecognisedError,
    Rotations,
    shape,
    tensor,
)
from anaphora.runtime.kernels import barrier, panel_head, panel_step, step, tiles
from anaphora.runtime.kernels.panel_attention import chunk_bytes, result_bytes
from anaphora.runtime.kernels.panel_products import GROUP_PANELS
from anaphora.runtime.kernels.panels import PANEL_TOKENS
from anaphora.runtime.kernels.unpacking import room_bytes
from anaphora.runtime.lora.context import AdapterContext
from anaphora.runtime.lora.panel_tables import PanelTables
from anaphora.runtime.panel_readers import Heads, find_readers
from anaphora.runtime.threads import ThreadTeam

Int64 = npt.NDArray[np.int64]

# A step of at least MIN_TOKENS, and at least MIN_MEAN_TOKENS for each sequence, takes less time than one of CpuStep,
# which reads the keys that several sequences share only once, and wastes no lanes on short ones: see docs/log.md.
MIN_TOKENS = 24
MIN_MEAN_TOKENS = 8


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
        sizes = (*shape(decoder.layers[0].output), *shape(mlp.gate), decoder.head_dim)
        if any(size % 32 for size in sizes):
            raise NotRecognisedError("it has sizes that are no multiples of 32")
        if not (step.has_tile_unit() and tiles_allowed()):
            raise NotRecognisedError("this CPU has no tile unit for bfloat16")
        self._codes, self._head_codes = few_tokens.codes, few_tokens.head_codes
        self._mlp_size, self._hidden_size = shape(mlp.gate)
        self._decoder, self._few_tokens = decoder, few_tokens
        self._num_heads, self._heads = num_heads, Heads(num_kv_heads, num_heads // num_kv_heads)
        self._kinds, self._numbers = tuple(kinds), few_tokens.numbers
        self._configuration = np.frombuffer(tiles.configuration(), dtype=np.uint8)
        self._addresses = few_tokens.addresses
        self._team = ThreadTeam(torch.get_num_threads(), barrier.BARRIER_SIZE)
        self._claims = np.zeros(barrier.CLAIMS_SIZE, dtype=np.int64)
        self._low_rank = PanelTables(decoder)
        self._rooms: dict[str, torch.Tensor] = {}

    def takes(self, num_tokens: int, context: object, adapters: AdapterContext | None = None) -> bool:
        """Whether this step is one for the tile unit."""
        if not isinstance(context, PagedContext) or context.cache.keys[0].dtype != torch.bfloat16:
            return False
        num_seqs = sum(call.num_seqs for call in context.groups[0].calls)
        if adapters is not None:  # CpuStep adds what they add with vectors, and takes fewer tokens
            is_for_few = num_tokens <= MAX_TOKENS_ADAPTERS and num_tokens < MIN_MEAN_TOKENS * num_seqs
            return not is_for_few and self._low_rank.takes(adapters)
        is_for_few = num_tokens <= self._few_tokens.max_tokens and num_tokens < MIN_MEAN_TOKENS * num_seqs
        return num_tokens >= MIN_TOKENS and not is_for_few

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
        panels = _panels(hidden)
        layers = range(len(self._decoder.layers))
        sizes, own = self._run(layers, panels, rotations, position_ids, context, adapters)
        return self._run_head(panels, sizes, own, keep)

    def run_layer(
        self,
        number: int,
        hidden: torch.Tensor,
        rotations: Rotations,
        position_ids: torch.Tensor,
        context: PagedContext,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], whatever T."""
        panels = _panels(hidden)
        self._run(range(number, number + 1), panels, rotations, position_ids, context)
        return panels.transpose(1, 2).reshape(-1, hidden.shape[1])[: len(hidden)]

    def _run(
        self,
        numbers: range,
        panels: torch.Tensor,
        rotations: Rotations,
        position_ids: torch.Tensor,
        context: PagedContext,
        adapters: AdapterContext | None = None,
    ) -> tuple[Int64, int]:
        """Overwrites the panels. Returns the kernels' sizes, and the address of the threads' own memory."""
        if torch.get_num_threads() != self._team.num_threads:
            self._team = ThreadTeam(torch.get_num_threads(), barrier.BARRIER_SIZE)
        team, dim, heads = self._team, self._decoder.head_dim, self._heads
        positions = position_ids[0].numpy()
        readers = find_readers(
            context.groups, self._kinds, positions, context.cache.block_size, heads.of_keys * dim * 2, heads,
            team.num_threads,
        )  # fmt: skip
        attention = chunk_bytes(dim) + 2 * readers.most_items * heads.group * result_bytes(dim)
        code_bytes = 0
        if self._codes or self._head_codes:
            hidden_size, widest = self._hidden_size, max(self._mlp_size, self._num_heads * dim)
            code_bytes = room_bytes((max(dim, 32), hidden_size), (32, widest))
        own_size = cdiv(panel_step.own_bytes(self._hidden_size, dim, attention, code_bytes), 64) * 64
        own = self._room("own", team.num_threads * own_size)
        cos, sin = (torch.stack([_panels(part.float()) for part in parts]) for parts in zip(*rotations, strict=True))
        slots = np.stack([group.slot_mapping.numpy() for group in context.groups])
        addresses, _ = self._addresses.now(context)
        layers = slice(numbers.start, numbers.stop)
        counts = (len(positions), self._hidden_size, self._num_heads, heads.of_keys, self._mlp_size, dim)
        sizes = np.array([*counts, chunk_bytes(dim), own_size, code_bytes], dtype=np.int64)
        added = self._low_rank.of_step(adapters, len(positions))
        narrow_bytes = added.most_rows * 2 * PANEL_TOKENS
        narrow = self._room("narrow", len(added.entries) * narrow_bytes)
        group_tokens = GROUP_PANELS * PANEL_TOKENS
        arguments = (
            team.num_threads, addresses[layers], self._addresses.scales[layers], sizes, self._numbers[layers],
            panels.data_ptr(), self._room("queries", len(panels) * self._num_heads * dim * PANEL_TOKENS * 2),
            self._room("gated", group_tokens * self._mlp_size * 2),
            self._room("wide", group_tokens * self._hidden_size * 4),
            cos.data_ptr(), sin.data_ptr(), slots, readers.rows.ctypes.data, readers.sequences, readers.items,
            readers.units, readers.merges, readers.parts, readers.visible.ctypes.data,
            self._room("partials", readers.num_results * result_bytes(dim)), added.downs[layers], added.ups[layers],
            (added.owners, added.entries, added.lanes.ctypes.data, narrow, narrow_bytes), team.barrier.ctypes.data,
            self._claims.ctypes.data, own, self._configuration.ctypes.data, self._codes,
        )  # fmt: skip
        self._claims[:] = 0
        team.run(lambda thread: panel_step.run_layers(thread, *arguments), self._abandon)
        return sizes, own

    def _run_head(
        self, panels: torch.Tensor, sizes: Int64, own: int, keep: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last norm and the head: logits of tokens `keep`, and all normed."""
        decoder, team, (num_tokens, hidden_size) = self._decoder, self._team, sizes[:2]
        head, num_words = tensor(decoder.head), shape(decoder.head)[0]
        in_kernel = num_words >= panel_head.BLOCK_WORDS
        normed = torch.empty((len(panels) * PANEL_TOKENS, hidden_size), dtype=torch.bfloat16)
        logits = torch.empty((len(keep) if in_kernel else 0, num_words), dtype=torch.bfloat16)
        kept = np.pad(keep.numpy(), (0, -len(keep) % PANEL_TOKENS), mode="edge" if len(keep) else "empty")
        kept = kept * int(hidden_size) * 2
        bias = decoder.head.get("bias")
        arguments = (
            team.num_threads, sizes, panels.data_ptr(), tensor(decoder.norm.parameters).data_ptr(),
            np.float32(decoder.norm.eps), np.float32(decoder.norm.offset), normed.data_ptr(), kept.ctypes.data,
            len(logits), head.data_ptr(), self._addresses.scales[-1, 0], 0 if bias is None else bias.data_ptr(),
            num_words, np.float32(decoder.soft_cap or 0), logits.data_ptr(), team.barrier.ctypes.data,
            self._claims.ctypes.data, own, self._configuration.ctypes.data, self._head_codes,
        )  # fmt: skip
        self._claims[:] = 0
        team.run(lambda thread: panel_head.run_head(thread, *arguments), self._abandon)
        normed = normed[:num_tokens]
        return logits if in_kernel else decoder.logits(normed.index_select(0, keep)), normed

    def _room(self, name: str, num_bytes: int) -> int:
        """The address of memory that the next step takes over."""
        if name not in self._rooms or self._rooms[name].numel() < num_bytes:
            self._rooms[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._rooms[name].data_ptr()

    def _abandon(self) -> None:
        self._team.barrier[barrier.ABANDONED] = 1


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """[T, n] -> [panels, n, 16]; behind the last token stand zeros."""
    count = cdiv(len(rows), PANEL_TOKENS)
    padded = rows.new_zeros((count * PANEL_TOKENS, rows.shape[1]))
    padded[: len(rows)] = rows
    return padded.view(count, PANEL_TOKENS, -1).transpose(1, 2).contiguous()
