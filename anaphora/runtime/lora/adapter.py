"""An adapter as it takes part in a model: pairs of matrices for some of its linear layers, and a digest of them all.

Knows tensors; must not know files, names or requests. The digest is the adapter's identity: it holds no name and no
path of a file, and everything that changes what the adapter adds (docs/hash-format.md has the bytes).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from anaphora.runtime.quantized_layers import LinearLayer

_TAG = b"anaphora/lora"
_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What one linear layer is to give besides its own result, as PEFT says it: scaling * b @ a @ x.

    a: [rank, in_features]. b: [out_features, rank]. Both on the layer's device and at least in float32, whatever the
    layer is in: PEFT computes so, too, and on a CPU it is the faster way.
    """

    layer: LinearLayer
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The same, as it is computed: x @ down @ up. down: [in_features, rank], of which each column lies in one piece.
    up: [rank, out_features], of which each row does.
    """

    layer: LinearLayer
    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """path of a layer -> its part. digest: SHA-256 in hex. rank: the largest."""

    parts: Mapping[str, AdapterPart]
    digest: str

    @property
    def rank(self) -> int:
        return max(part.up.shape[0] for part in self.parts.values())

    @property
    def num_bytes(self) -> int:
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts.values())


def make_adapter(pairs: Mapping[str, LowRankPair]) -> Adapter:
    """An adapter of these pairs: path of a layer -> its pair."""
    digest = hashlib.sha256(_TAG + struct.pack("<BI", _FORMAT_VERSION, len(pairs)))
    parts = {}
    for path in sorted(pairs):
        pair = pairs[path]
        for text in (path, str(pair.a.dtype).removeprefix("torch.")):
            data = text.encode()
            digest.update(struct.pack("<I", len(data)) + data)
        (rank, in_features), out_features = pair.a.shape, pair.b.shape[0]
        digest.update(struct.pack("<dIII", pair.scaling, rank, in_features, out_features))
        for matrix in (pair.a, pair.b):
            digest.update(matrix.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        parts[path] = AdapterPart(
            pair.layer,
            pair.a.clone(memory_format=torch.contiguous_format).t(),
            (pair.scaling * pair.b).t().contiguous(),
        )
    return Adapter(parts, digest.hexdigest())
