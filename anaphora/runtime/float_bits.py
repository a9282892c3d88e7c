"""What the bits of floating-point numbers say: whether all are finite, and which one is the largest.

Knows how floats are coded; knows nothing of what they mean. Read as integers with a sign, floats from 0 on are in
order, infinity and NaN behind the others, and those with a sign are below 0; read without one, those with a sign come
last, in the same way. So passes over integers answer where torch would wake its threads, or convert the numbers first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

# Of each dtype: the integers of its width, torch's with a sign and numpy's without, infinity's bits and -infinity's.
_CODES: dict[torch.dtype, tuple[torch.dtype, npt.DTypeLike, int, int]] = {
    torch.float32: (torch.int32, np.uint32, 0x7F80_0000, 0xFF80_0000),
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80, 0xFF80),
    torch.float16: (torch.int16, np.uint16, 0x7C00, 0xFC00),
}


def all_finite(numbers: torch.Tensor) -> bool:
    """Whether none of them is infinite or NaN; of any floating dtype, on any device."""
    if numbers.device.type != "cpu" or numbers.dtype not in _CODES:
        # A sum is finite only if every term is, and far cheaper than asking each; it may overflow.
        return bool(numbers.sum(dtype=torch.float32).isfinite()) or bool(numbers.isfinite().all())
    signed, unsigned, infinity, minus_infinity = _CODES[numbers.dtype]
    bits = numbers.view(signed).numpy()
    return bool(bits.max(initial=0) < infinity and bits.view(unsigned).max(initial=0) < minus_infinity)


def largest(rows: torch.Tensor) -> list[int]:
    """The place of the largest number of each row [n, m], the first one among equals; they are finite."""
    if rows.device.type != "cpu":
        return [int(place) for place in rows.float().argmax(dim=-1).tolist()]
    if rows.dtype not in (torch.bfloat16, torch.float16):  # what numpy knows: some ten times as fast as torch's
        return [int(place) for place in rows.numpy().argmax(axis=-1)]
    bits = rows.view(torch.int16).numpy()
    places = bits.argmax(axis=-1).tolist()
    if any(bits[row, place] <= 0 for row, place in enumerate(places)):  # none is above 0: these are not in order
        return largest(rows.float())
    return [int(place) for place in places]
