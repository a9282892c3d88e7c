"""Layers whose weight is codes, in the place of a model's own.

Knows modules and `codes`; knows nothing of which layers of a model take part.
"""

from __future__ import annotations

import torch

from anaphora.runtime.codes import can_hold, dequantize, embed, linear, matrix_shape, num_bits, quantize


class StoredWeight:
    """A matrix [out, in] that is held as codes and scales, and known to others by its shape and dtype.

    bits: of a code. dtype: of the matrix that it stands for. Takes new values in place.
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        codes, scales = quantize(weight, bits)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)
        self.dtype = weight.dtype

    @property
    def shape(self) -> torch.Size:
        return matrix_shape(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def matrix(self) -> torch.Tensor:
        """The matrix itself, rounded to its dtype. Costs its memory."""
        return dequantize(self.codes, self.scales, self.dtype)

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether this matrix gives the codes and scales that are here."""
        codes, scales = quantize(weight.to(self.device), num_bits(self.codes))
        return torch.equal(codes, self.codes) and torch.equal(scales, self.scales)

    def can_hold(self, weight: torch.Tensor) -> bool:
        """Whether a matrix has codes and scales at all; see `codes.can_hold`."""
        return can_hold(weight.to(self.device), num_bits(self.codes))

    def copy_(self, weight: torch.Tensor) -> None:
        codes, scales = quantize(weight, num_bits(self.codes))
        self.codes.copy_(codes)
        self.scales.copy_(scales)


class QuantizedLinear(torch.nn.Module):
    """A linear layer over a StoredWeight; its bias [out] is the layer's own, or None."""

    codes: torch.nn.Parameter
    scales: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(self, stored: StoredWeight, bias: torch.nn.Parameter | None = None) -> None:
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


class QuantizedEmbedding(torch.nn.Module):
    """An embedding over a StoredWeight. embed_scale: what the rows are multiplied with, None for 1."""

    codes: torch.nn.Parameter
    scales: torch.nn.Parameter
    embed_scale: torch.Tensor | None

    def __init__(self, stored: StoredWeight, embed_scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.stored = stored
        self.num_embeddings, self.embedding_dim = stored.shape
        self.codes, self.scales = stored.codes, stored.scales
        self.register_buffer("embed_scale", embed_scale, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """See QuantizedLinear."""
        return self.stored.matrix()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = embed(token_ids, self.codes, self.scales, self.stored.dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


LinearLayer = torch.nn.Linear | QuantizedLinear
