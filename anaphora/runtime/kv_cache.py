"""The K/V pool: one memory for the layers of every group, cut into blocks.

Knows the memory layout and nothing of requests, plans or who owns a block. A slot is
`block_id * block_size + offset`. A block has *places*, each with room for one layer; a layer of every group may have
the same place, as a block belongs to one group at a time. Layers whose rows are narrow stand side by side in one:

    block of group 0   [      layer 5      |      layer 11     ]
    block of group 1   [ layer 0 | layer 1 | layer 2 | layer 3 ]
                               place 0             place 1

Layout of a layer's keys (values alike): [num_blocks, block_size, num_kv_heads, key_dim]. A place is as wide as the
widest that stands in it; what others leave of each token's row stays unused.
Writing the tokens of a step is one row copy per token, and reading a request is one row copy per block;
what is read lies token by token, so it is cut to the exact context without another copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one attention layer stores for one token: `num_kv_heads` keys and values of these lengths."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where an attention layer keeps its keys and values: in the blocks of `group`, at `place`.

    part: how many layers of the same shape stand before it in the place.
    """

    group: int
    place: int
    shape: KVShape
    part: int = 0


def _widths(layers: Sequence[LayerPlace]) -> list[tuple[int, int]]:
    """Elements of one token's keys and values at each place."""
    widths = [(0, 0)] * (1 + max((layer.place for layer in layers), default=-1))
    for layer in layers:
        (keys, values), shape = widths[layer.place], layer.shape
        end = (layer.part + 1) * shape.num_kv_heads
        widths[layer.place] = max(keys, end * shape.key_dim), max(values, end * shape.value_dim)
    return widths


def bytes_per_block(layers: Sequence[LayerPlace], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes, of whichever group it is."""
    return sum(keys + values for keys, values in _widths(layers)) * block_size * dtype.itemsize


def bytes_per_token(layers: Sequence[LayerPlace], dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes that the layers of each group write for one token; what its blocks leave unused is not among them."""
    totals = [0] * (1 + max((layer.group for layer in layers), default=-1))
    for layer in layers:
        totals[layer.group] += layer.shape.num_elements * dtype.itemsize
    return tuple(totals)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages and does not touch them (torch.zeros does), so a large
    # pool is there at once and takes memory only as it fills.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


class KVCache:
    """Keys and values of every layer. Block 0 is the null block: nobody writes it, so it stays zero.

    num_blocks counts the null block. `layer` arguments count attention layers from 0, as `layers` does.
    keys, values: of each layer, views of the places' memory. addresses: [layers, 2], of each one's keys and values,
    where they stay as long as the cache lives.
    """

    def __init__(
        self,
        layers: Sequence[LayerPlace],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        widths = _widths(layers)
        key_places = [_zeros((num_blocks, block_size, keys), dtype, device) for keys, _ in widths]
        value_places = [_zeros((num_blocks, block_size, values), dtype, device) for _, values in widths]
        self.keys = [_view(key_places[la.place], la, la.shape.key_dim) for la in layers]
        self.values = [_view(value_places[la.place], la, la.shape.value_dim) for la in layers]
        self.addresses = np.array(
            [(keys.data_ptr(), values.data_ptr()) for keys, values in zip(self.keys, self.values, strict=True)],
            dtype=np.int64,
        ).reshape(-1, 2)
        # The same memory, by slot: [num_blocks * block_size, ...].
        self._places = [place.flatten(0, 1) for place in (*key_places, *value_places)]
        self._key_slots = [keys.flatten(0, 1) for keys in self.keys]
        self._value_slots = [values.flatten(0, 1) for values in self.values]

    @property
    def num_bytes(self) -> int:
        return sum(place.nbytes for place in self._places)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values [num_tokens, num_kv_heads, dim] into slots [num_tokens] (int64)."""
        pool = self._key_slots[layer]
        pool.index_copy_(0, slots, keys.to(pool.dtype))
        self._value_slots[layer].index_copy_(0, slots, values.to(pool.dtype))

    def read(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of blocks [n]: [n * block_size, num_kv_heads, dim] each."""
        keys = self.keys[layer].index_select(0, block_ids)
        values = self.values[layer].index_select(0, block_ids)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def wipe(self, slots: torch.Tensor) -> None:
        """Zero slots [n] (int64), whichever group they are of."""
        for place in self._places:
            place.index_fill_(0, slots, 0)


def _view(place: torch.Tensor, layer: LayerPlace, dim: int) -> torch.Tensor:
    heads = layer.shape.num_kv_heads
    own = place[:, :, layer.part * heads * dim : (layer.part + 1) * heads * dim]
    return own.view(*place.shape[:2], heads, dim)
