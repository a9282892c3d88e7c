"""The K/V pool: one key tensor and one value tensor per attention layer, cut into blocks.

Knows the memory layout and nothing of requests, plans or who owns a block. A slot is
`block_id * block_size + offset`. Layout of a layer's keys (values alike):

    [num_blocks, block_size, num_kv_heads, key_dim]

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


def bytes_per_block(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    return sum(shape.num_elements for shape in shapes) * block_size * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages and does not touch them (torch.zeros does), so a large
    # pool is there at once and takes memory only as it fills.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


class KVCache:
    """Keys and values of every layer. Block 0 is the null block: nobody writes it, so it stays zero.

    num_blocks counts the null block. `layer` arguments count attention layers from 0.
    """

    def __init__(
        self, shapes: Sequence[KVShape], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [_zeros((num_blocks, block_size, s.num_kv_heads, s.key_dim), dtype, device) for s in shapes]
        self.values = [_zeros((num_blocks, block_size, s.num_kv_heads, s.value_dim), dtype, device) for s in shapes]
        # The same memory, by slot: [num_blocks * block_size, num_kv_heads, dim].
        self._key_slots = [keys.flatten(0, 1) for keys in self.keys]
        self._value_slots = [values.flatten(0, 1) for values in self.values]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

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
        """Zero slots [n] (int64) in every layer."""
        for pool in (*self._key_slots, *self._value_slots):
            pool.index_fill_(0, slots, 0)
