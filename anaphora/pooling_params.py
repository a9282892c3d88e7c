"""What one request wants of its prompt's hidden states, instead of output. Plain data.

Knows nothing of tensors: `runtime.pooling` gives these fields their arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.errors import InvalidParameterError

POOLINGS = ("last", "mean", "token")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How the final (normed) hidden states of a prompt become an embedding.

    pooling: `last` is the last token's, which has seen the whole prompt; `mean` the mean of all tokens'; `token` one
        row for each token. The latter two need every position: such a request reads no cached block.
    normalize: scale every row to length 1 (L2).
    dimensions: keep the first so many numbers, before the scaling; only for models trained for that (Matryoshka).

    Raises InvalidParameterError.
    """

    pooling: str = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise InvalidParameterError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if not isinstance(self.normalize, bool):
            raise InvalidParameterError(f"normalize must be True or False, got {self.normalize!r}")
        if self.dimensions is None:
            return
        if isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int) or self.dimensions < 1:
            raise InvalidParameterError(f"dimensions must be an integer >= 1 or None, got {self.dimensions!r}")

    @property
    def needs_every_position(self) -> bool:
        return self.pooling != "last"
