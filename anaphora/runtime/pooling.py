"""From the hidden states of one request's prompt to its embedding, chunk by chunk.

Knows hidden states and pooling parameters; knows nothing of plans, blocks and models.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import Any

import torch

from anaphora.core.plan import Embedding
from anaphora.errors import InvalidParameterError
from anaphora.pooling_params import PoolingParams


class Pooler:
    """Takes the rows of a prompt in order of position. num_tokens: of the whole prompt."""

    def __init__(self, params: PoolingParams, num_tokens: int) -> None:
        self._params = params
        self._num_tokens = num_tokens
        self._num_taken = 0
        self._sum: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []

    def take(self, start: int, rows: torch.Tensor) -> Embedding | None:
        """Final hidden states [n, hidden] at positions [start, start + n); the embedding, once the prompt is whole."""
        if self._params.needs_every_position and start != self._num_taken:
            raise RuntimeError(f"pooling has {self._num_taken} rows and is given those from {start}: a bug")
        self._num_taken = start + rows.shape[0]
        if self._params.pooling == "mean":
            for row in rows.double():  # one after another: how the prompt was cut does not change the sum
                self._sum = row if self._sum is None else self._sum + row
        elif self._params.pooling == "token":
            self._rows.append(rows.float())  # a copy is not needed: every step makes its own hidden states
        if self._num_taken < self._num_tokens:
            return None
        return self._embedding(self._pooled(rows))

    def _pooled(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] float64, or float32 for a row each token."""
        if self._sum is not None:
            return (self._sum / self._num_tokens).unsqueeze(0)
        if self._rows:
            pooled, self._rows = torch.cat(self._rows), []
            return pooled
        return rows[-1:].double()

    def _embedding(self, pooled: torch.Tensor) -> Embedding:
        if self._params.dimensions is not None:
            pooled = pooled[:, : self._params.dimensions]
        if self._params.normalize:
            # Length in float64: the square of a large float32 is none.
            length = torch.linalg.vector_norm(pooled, dim=-1, keepdim=True, dtype=torch.float64)
            pooled = pooled / length.clamp_min(torch.finfo(torch.float64).tiny)
        values = pooled.float().cpu().contiguous().numpy().astype("<f4", copy=False)
        return Embedding(values.tobytes(), pooled.shape[1])


def trained_dimensions(config: Any) -> Container[int]:
    """Shorter embeddings that a model says it was trained for (Matryoshka); of most models none.

    config: the model's. The names of the two settings are those that embedding models carry for other engines, too.
    """
    listed = getattr(config, "matryoshka_dimensions", None)
    if listed:
        return frozenset(listed)
    return range(1, sys.maxsize) if getattr(config, "is_matryoshka", False) else ()


def check_dimensions(wanted: int | None, size: int | None, trained: Container[int]) -> None:
    """size: of the hidden states; None if the model does not tell. Raises InvalidParameterError."""
    if wanted is None or wanted == size or (size is not None and wanted < size and wanted in trained):
        return
    raise InvalidParameterError(
        f"dimensions {wanted} cannot be had: the embeddings of this model have {size} numbers, and it was not trained "
        "to be cut off there (Matryoshka); leave dimensions out"
    )
