"""An adapter as it takes part in a model: pairs of matrices for some of its linear layers, and a digest of them all.

Knows tensors; must not know files, names or requests. The digest is the adapter's identity: it holds no name and no
path, and everything that changes what the adapter adds (docs/hash-format.md has the bytes).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_TAG = b"anaphora/lora"
_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What one linear layer gives besides its own result: scaling * b @ a @ x.

    a: [rank, in_features]. b: [out_features, rank]. Both are in the dtype and on the device of the layer's weight.
    """

    layer: torch.nn.Linear
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """path of a layer -> its pair. digest: SHA-256 in hex. rank: the largest."""

    pairs: Mapping[str, LowRankPair]
    digest: str

    @property
    def rank(self) -> int:
        return max(pair.a.shape[0] for pair in self.pairs.values())

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


def make_adapter(pairs: Mapping[str, LowRankPair]) -> Adapter:
    """An adapter of these pairs, which are not to be changed afterwards."""
    digest = hashlib.sha256(_TAG + struct.pack("<BI", _FORMAT_VERSION, len(pairs)))
    for path in sorted(pairs):
        pair = pairs[path]
        for text in (path, str(pair.a.dtype).removeprefix("torch.")):
            data = text.encode()
            digest.update(struct.pack("<I", len(data)) + data)
        (rank, in_features), out_features = pair.a.shape, pair.b.shape[0]
        digest.update(struct.pack("<dIII", pair.scaling, rank, in_features, out_features))
        for matrix in (pair.a, pair.b):
            digest.update(matrix.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Adapter(pairs, digest.hexdigest())
