"""Weights as whole numbers in groups: a matrix [out, in] whose every 32 numbers of a row share a scale.

    8 bits      weight = code × scale               codes -128 to 127, kept as 0 to 255
    4 bits      weight = code × scale + minimum     codes 0 to 15

Knows tensors; knows nothing of models and options. Scales and minima are float16, kept as the int16 of the same bits: a
module's dtype is taken from its first floating-point parameter. Codes lie as the kernels read them, 16 outputs side by
side: see `kernels.code_layout`. So `out` is a multiple of 16 and `in` one of 32, and the shape of the codes says how
many bits they have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 32
BLOCK = 16


def fits(weight: torch.Tensor) -> bool:
    """Whether a matrix has a size that codes can have."""
    return weight.shape[0] % BLOCK == 0 and weight.shape[1] % GROUP == 0


def matrix_shape(codes: torch.Tensor) -> torch.Size:
    return torch.Size((codes.shape[0] * BLOCK, codes.shape[1] * GROUP))


def num_bits(codes: torch.Tensor) -> int:
    return codes.shape[2]


def quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 and scales int16 of a matrix that `fits`; bits: 8 or 4.

    Scales and minima are rounded before the codes are chosen. Of a group that is not finite neither is the scale, so
    what it gives is found as it would be without codes.
    """
    groups, low, scales = _groups(weight, bits)
    largest = 127 if bits == 8 else 15
    scales.masked_fill_(scales == 0, 1)
    codes = groups.sub(low.float()).div_(scales.float()).round_().clamp_(largest - (1 << bits) + 1, largest)
    codes = codes.nan_to_num_(0).add_((1 << bits) - 1 - largest).to(torch.uint8)
    sides = scales if bits == 8 else torch.cat((scales, low), dim=2)
    return _pack(codes, bits), sides.view(-1, BLOCK, *sides.shape[1:]).permute(0, 2, 3, 1).contiguous().view(
        torch.int16
    )


def can_hold(weight: torch.Tensor, bits: int) -> bool:
    """Whether every group of a matrix has a scale and a minimum, as numbers that are finite and fit float16 have."""
    _, low, scales = _groups(weight, bits)
    return bool((low.isfinite() & scales.isfinite()).all())


def _groups(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix as float32 [out, groups, 32], and of each group minimum and scale, float16 [out, groups, 1]."""
    groups = weight.detach().float().reshape(weight.shape[0], -1, GROUP)
    if bits == 8:
        scales = groups.abs().amax(dim=2, keepdim=True).div_(127).half()
        return groups, torch.zeros_like(scales), scales
    low = groups.amin(dim=2, keepdim=True).half()
    return groups, low, (groups.amax(dim=2, keepdim=True) - low.float()).div_(15).half()


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[out, groups, 32] -> [out / 16, groups, bits, 16, 4]."""
    fours = codes.view(*codes.shape[:2], -1, 4)
    if bits == 4:
        fours = fours[:, :, :4] | fours[:, :, 4:] << 4
    return fours.view(-1, BLOCK, *fours.shape[1:]).permute(0, 2, 3, 1, 4).contiguous()


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, in] that they stand for, rounded to a dtype."""
    fours = codes.view(torch.int32).permute(0, 3, 1, 2, 4).contiguous()  # of four bytes each: as fast as one
    return _dequantize_rows(fours.view(torch.uint8).flatten(0, 1), scales.permute(0, 3, 1, 2).flatten(0, 1), dtype)


def _dequantize_rows(codes: torch.Tensor, sides: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, groups, bits, 4] and [n, groups, 1 or 2] -> [n, in]."""
    codes, sides = codes.flatten(2), sides.contiguous().view(torch.float16).float()
    if codes.shape[2] == GROUP:
        values = codes.float().sub_(128).mul_(sides)
    else:
        half = GROUP // 2
        values = sides.new_empty(*codes.shape[:2], GROUP)
        values[..., :half], values[..., half:] = codes & 15, codes >> 4
        values.mul_(sides[..., :1]).add_(sides[..., 1:])
    return values.flatten(1).to(dtype)


def linear(
    inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., in] @ weight.T + bias -> [..., out]."""
    return F.linear(inputs, dequantize(codes, scales, inputs.dtype), bias)


def embed(token_ids: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the matrix [..., in]."""
    ids = token_ids.flatten()
    blocks, places = ids // BLOCK, ids % BLOCK
    rows = _dequantize_rows(codes[blocks, :, :, places], scales[blocks, :, :, places], dtype)
    return rows.view(*token_ids.shape, -1)
