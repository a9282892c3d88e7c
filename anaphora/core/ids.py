"""The names of things. Each is a plain int, bytes or str at run time; the types keep them apart for the reader."""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)  # index of a block in the pool
BlockHash = NewType("BlockHash", bytes)  # digest that names a block and everything before it
TokenId = NewType("TokenId", int)
RequestId = NewType("RequestId", str)
StateSlot = NewType("StateSlot", int)  # index of a checkpoint of recurrent state, from 0
Lineage = NewType("Lineage", int)  # serial number of one exact beginning, never reused; see prefix_index

NULL_BLOCK = BlockId(0)
"""Never hashed, written or freed; stands for positions that no layer of a group reads."""


NO_LINEAGE = Lineage(0)
"""Of a block that holds nothing findable."""


def cdiv(numerator: int, denominator: int) -> int:
    """Quotient rounded up."""
    return -(-numerator // denominator)
