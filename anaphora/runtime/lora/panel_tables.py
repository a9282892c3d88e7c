"""Adapters as the tile unit takes them: matrices in bfloat16, side by side, and which panel of a step has which.

Knows a recognised decoder's parts and adapters; must not know plans or how the kernels compute. Parts that read the
same numbers, such as queries, keys and values, are brought together:

    down of queries [3, in], keys [20, in]  ->  rows 0 to 2 | 16 to 35, and zeros up to 64
    ups                                     ->  [out, 32] of numbers 0 to 31, [out, 64] of all
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from anaphora.core.ids import cdiv
from anaphora.runtime.decoder import Decoder
from anaphora.runtime.kernels.low_rank import DOWN_PART, GATE_PART, NUM_PARTS, UP_PART, K, O, Q, V
from anaphora.runtime.kernels.panel_adapters import (
    ATTENTION_INPUT,
    DOWN_INPUT,
    MLP_INPUT,
    NUM_INPUTS,
    OUTPUT_INPUT,
)
from anaphora.runtime.kernels.panels import PANEL_TOKENS
from anaphora.runtime.lora.adapter import Adapter, AdapterPart
from anaphora.runtime.lora.addresses import find_places
from anaphora.runtime.lora.context import AdapterContext

Int64 = npt.NDArray[np.int64]

_TILE_NUMBERS, _TILE_ROWS = 32, 16
_INPUTS = {ATTENTION_INPUT: (Q, K, V), OUTPUT_INPUT: (O,), MLP_INPUT: (GATE_PART, UP_PART), DOWN_INPUT: (DOWN_PART,)}


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of one step; see kernels.panel_adapters. downs, ups: of every layer. most_rows: of any input."""

    downs: Int64
    ups: Int64
    owners: Int64
    entries: Int64
    lanes: npt.NDArray[np.int32]
    most_rows: int


class PanelTables:
    """Tables of the adapters of one decoder, made when a step first has them and kept as long as they live."""

    def __init__(self, decoder: Decoder) -> None:
        self._places = find_places(decoder)
        self._num_layers = len(decoder.layers)
        self._made: WeakKeyDictionary[Adapter, _Matrices | None] = WeakKeyDictionary()

    def takes(self, context: AdapterContext) -> bool:
        """Whether every layer that they change is one of the decoder's, and all numbers are finite in bfloat16: a panel
        may hold tokens of others, and infinity times nothing is no number.
        """
        return all(self._matrices(adapter) is not None for adapter in context.adapters)

    def of_step(self, context: AdapterContext | None, num_tokens: int) -> StepAdapters:
        """Of adapters that are taken; without any, empty tables."""
        matrices = [made for adapter in (context.adapters if context else ()) if (made := self._matrices(adapter))]
        num_panels = cdiv(num_tokens, PANEL_TOKENS)
        numbers = np.full((num_panels, PANEL_TOKENS), -1, dtype=np.int64)
        if context is not None:
            numbers.reshape(-1)[:num_tokens] = context.numbers.numpy()
        mine = numbers[:, None] == np.arange(len(matrices))[:, None]  # [panels, adapters, 16]
        panels, entries = np.nonzero(mine.any(axis=2))
        nothing = np.zeros((self._num_layers, NUM_PARTS, 0, 3), dtype=np.int64)
        return StepAdapters(
            downs=np.stack([each.downs for each in matrices], axis=2) if matrices else nothing[:, :NUM_INPUTS, :, :2],
            ups=np.stack([each.ups for each in matrices], axis=2) if matrices else nothing,
            owners=np.searchsorted(panels, np.arange(num_panels + 1)),
            entries=entries,
            lanes=-mine[panels, entries].astype(np.int32),
            most_rows=max((int(each.downs[..., 1].max()) for each in matrices), default=0),
        )

    def _matrices(self, adapter: Adapter) -> _Matrices | None:
        if adapter not in self._made:
            self._made[adapter] = self._make(adapter)
        return self._made[adapter]

    def _make(self, adapter: Adapter) -> _Matrices | None:
        parts: dict[tuple[int, int], AdapterPart] = {}
        for part in adapter.parts.values():
            place = self._places.get(id(part.layer._parameters))
            if place is None:
                return None
            parts[place] = part
        made = _Matrices(self._num_layers)
        for layer in range(self._num_layers):
            for number, members in _INPUTS.items():
                made.add(
                    layer, number, {member: parts[layer, member] for member in members if (layer, member) in parts}
                )
        return made if all(bool(matrix.isfinite().all()) for matrix in made.tensors) else None


class _Matrices:
    """One adapter's. tensors: what the addresses lead to."""

    def __init__(self, num_layers: int) -> None:
        self.downs = np.zeros((num_layers, NUM_INPUTS, 2), dtype=np.int64)
        self.ups = np.zeros((num_layers, NUM_PARTS, 3), dtype=np.int64)
        self.tensors: list[torch.Tensor] = []

    def add(self, layer: int, number: int, parts: dict[int, AdapterPart]) -> None:
        """parts: of one input, by their numbers."""
        if not parts:
            return
        begins, num_rows = {}, 0
        for member, part in parts.items():
            begins[member] = num_rows
            num_rows += cdiv(part.up.shape[0], _TILE_ROWS) * _TILE_ROWS
        num_rows = cdiv(num_rows, _TILE_NUMBERS) * _TILE_NUMBERS
        down = torch.zeros(num_rows, next(iter(parts.values())).down.shape[0], dtype=torch.bfloat16)
        self.tensors.append(down)
        self.downs[layer, number] = down.data_ptr(), num_rows
        for member, part in parts.items():
            rank, num_outputs = part.up.shape
            begin, first = begins[member], begins[member] // _TILE_NUMBERS * _TILE_NUMBERS
            down[begin : begin + rank] = part.down.t()
            up = torch.zeros(num_outputs, cdiv(begin + rank - first, _TILE_NUMBERS) * _TILE_NUMBERS, dtype=down.dtype)
            up[:, begin - first : begin - first + rank] = part.up.t()
            self.tensors.append(up)
            self.ups[layer, member] = up.data_ptr(), first, up.shape[1]
