"""Where the matrices of adapters lie, by layer and linear part, for kernels that add them in the middle of a step.

Knows a recognised decoder's parts and adapters; must not know plans or how the kernels compute.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from anaphora.runtime.decoder import Decoder, DecoderLayer, Parameters
from anaphora.runtime.kernels.low_rank import NUM_PARTS
from anaphora.runtime.lora.adapter import Adapter
from anaphora.runtime.lora.context import AdapterContext

_Table = npt.NDArray[np.int64]


class LowRankTables:
    """Tables of the adapters of one decoder, made when a step first has them and kept as long as they live."""

    def __init__(self, decoder: Decoder) -> None:
        self._places = find_places(decoder)
        self._shape = len(decoder.layers), NUM_PARTS, 3
        self._tables: WeakKeyDictionary[Adapter, _Table] = WeakKeyDictionary()
        self._nothing = np.zeros((len(decoder.layers), NUM_PARTS, 0, 3), dtype=np.int64), np.zeros(0, dtype=np.int64), 0

    def takes(self, context: AdapterContext) -> bool:
        """Whether every layer that they change is one of the decoder's, and all numbers are float32."""
        return all(
            id(part.layer._parameters) in self._places and part.down.dtype == part.up.dtype == torch.float32
            for adapter in context.adapters
            if adapter not in self._tables
            for part in adapter.parts.values()
        )

    def of_step(self, context: AdapterContext | None) -> tuple[_Table, _Table, int]:
        """The table [layers, parts, adapters, 3], the adapter of each token or -1, and the largest rank.

        Columns as in kernels.low_rank. Without adapters there are no tokens either.
        """
        if context is None:
            return self._nothing
        tables = [self._table(adapter) for adapter in context.adapters]
        return np.stack(tables, axis=2), context.numbers.numpy(), max(adapter.rank for adapter in context.adapters)

    def _table(self, adapter: Adapter) -> _Table:
        table = self._tables.get(adapter)
        if table is None:
            table = self._tables[adapter] = np.zeros(self._shape, dtype=np.int64)
            for part in adapter.parts.values():
                table[self._places[id(part.layer._parameters)]] = (
                    part.down.data_ptr(),
                    part.up.data_ptr(),
                    part.up.shape[0],
                )
        return table


def find_places(decoder: Decoder) -> dict[int, tuple[int, int]]:
    """The layer and the linear part that parameters, by their `id`, belong to."""
    return {
        id(part): (number, index)
        for number, layer in enumerate(decoder.layers)
        for index, part in enumerate(_parts(layer))
    }


def _parts(layer: DecoderLayer) -> tuple[Parameters, ...]:
    """In the order of kernels.low_rank."""
    mlp: Any = layer.mlp  # of what the kernels take, a gated one
    return layer.query, layer.key, layer.value, layer.output, mlp.gate, mlp.up, mlp.down
