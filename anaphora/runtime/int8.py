"""Weights in eight bits: linear layers and embeddings whose every row is whole numbers times one scale.

    weight[out, in] = codes[out, in] * scales[out]      codes: int8, -127 to 127; scales: in the model's dtype

Knows tensors; knows nothing of models and options. Every dtype that a model computes in holds a code exactly, so
however a product is computed, it is one with the same weight, and only its own sums are rounded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LARGEST_CODE = 127


class Int8Weight:
    """A matrix [out, in] that is held as codes and scales, and known to others by its shape and dtype.

    dtype: of the matrix that it stands for and of its scales. Takes new values in place.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        codes, scales = quantize_rows(weight)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def matrix(self) -> torch.Tensor:
        """The matrix itself, rounded to its dtype. Costs its memory."""
        return dequantize_rows(self.codes, self.scales)

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether this matrix gives the codes and scales that are here."""
        codes, scales = quantize_rows(weight.to(self.device))
        return torch.equal(codes, self.codes) and torch.equal(scales, self.scales)

    def copy_(self, weight: torch.Tensor) -> None:
        codes, scales = quantize_rows(weight)
        self.codes.copy_(codes)
        self.scales.copy_(scales)


class Int8Linear(torch.nn.Module):
    """A linear layer over an Int8Weight; its bias [out] is the layer's own, or None."""

    codes: torch.nn.Parameter
    scales: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(self, stored: Int8Weight, bias: torch.nn.Parameter | None = None) -> None:
        super().__init__()
        self.stored = stored
        self.out_features, self.in_features = stored.shape
        self.codes, self.scales = stored.codes, stored.scales
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> torch.Tensor:
        """What a linear layer has by this name; made anew each time."""
        return self.stored.matrix()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self.codes, self.scales, self.bias)


class Int8Embedding(torch.nn.Module):
    """An embedding over an Int8Weight. embed_scale: what the rows are multiplied with, None for 1."""

    codes: torch.nn.Parameter
    scales: torch.nn.Parameter
    embed_scale: torch.Tensor | None

    def __init__(self, stored: Int8Weight, embed_scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.stored = stored
        self.num_embeddings, self.embedding_dim = stored.shape
        self.codes, self.scales = stored.codes, stored.scales
        self.register_buffer("embed_scale", embed_scale, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """See Int8Linear."""
        return self.stored.matrix()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = embed(token_ids, self.codes, self.scales)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


LinearLayer = torch.nn.Linear | Int8Linear


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 and scales of a matrix [out, in]: a row's largest number has the largest code.

    The scale is rounded to the matrix's dtype before the codes are chosen. A row that is not finite has a scale that is
    not, either, so what it gives is found as it would be without codes.
    """
    rows = weight.detach().float()
    scales = (rows.abs().amax(dim=1) / LARGEST_CODE).to(weight.dtype)
    scales = scales.masked_fill(scales == 0, 1)
    codes = (rows / scales.float().unsqueeze(1)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.nan_to_num_(0).to(torch.int8), scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[rows, in] in the dtype of the scales."""
    return codes.to(scales.dtype) * scales.unsqueeze(1)


def linear(
    inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., in] @ weight.T + bias -> [..., out]."""
    if inputs.dtype == torch.float16:  # sums of codes may be too large for it
        return F.linear(inputs, dequantize_rows(codes, scales), bias)
    product = F.linear(inputs, codes.to(inputs.dtype)).mul_(scales)
    return product if bias is None else product.add_(bias)


def embed(token_ids: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix [..., in]."""
    return F.embedding(token_ids, codes).to(scales.dtype) * scales[token_ids].unsqueeze(-1)
