"""What a model is, in fields, and what it is after its weights were changed. Knows digests; must not know tensors.

The cache's root is the digest of these fields (docs/hash-format.md), so models that differ share no block.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType


class ModelIdentity:
    """fields: of the model as it was loaded, or of another one. Never changes."""

    def __init__(self, fields: Mapping[str, str], *, loaded_weights: str | None = None) -> None:
        self.fields: Mapping[str, str] = MappingProxyType(dict(fields))
        self._loaded_weights = fields.get("weights", "") if loaded_weights is None else loaded_weights

    def after(self, history: str) -> ModelIdentity:
        """history: a digest of every update of the weights since the model was loaded."""
        weights = sha256(f"{self._loaded_weights}\n{history}".encode()).hexdigest()
        return ModelIdentity({**self.fields, "weights": weights}, loaded_weights=self._loaded_weights)
