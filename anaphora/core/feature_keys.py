"""The extra keys of what stands in a prompt instead of tokens: images, and rows given by the caller.

Knows positions, digests and bytes; must not know pixels, tensors or models. The payloads are in docs/hash-format.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from anaphora.core.hashing import ExtraKey, ExtraKeyKind
from anaphora.core.plan import FeatureSpan


def image_keys(spans: Iterable[FeatureSpan], block_size: int) -> tuple[ExtraKey, ...]:
    """One key for each block that a span touches: its digest, where it begins relative to the block, its length."""
    return tuple(
        ExtraKey(
            ExtraKeyKind.MULTIMODAL,
            bytes.fromhex(span.digest) + struct.pack("<iI", span.start - index * block_size, span.length),
            index,
        )
        for span in spans
        for index in range(span.start // block_size, (span.stop - 1) // block_size + 1)
    )


def embedding_keys(mask: Sequence[bool], rows: bytes, block_size: int) -> tuple[ExtraKey, ...]:
    """One key for each block with rows in it: which of its positions they are, and a digest of them.

    mask: of each position of the prompt, whether it is a row. rows: all rows, one after the other, as they are computed
    with, each number little-endian. Raises ValueError if the rows are no whole number for the mask.
    """
    num_rows = sum(mask)
    row_bytes, rest = divmod(len(rows), num_rows) if num_rows else (0, len(rows))
    if rest:
        raise ValueError(f"{len(rows)} bytes are no {num_rows} rows of one size")
    keys, begin = [], 0
    for index in range(-(-len(mask) // block_size)):
        block = mask[index * block_size : (index + 1) * block_size]
        count = sum(block)
        if count:
            bits = sum(1 << position for position, is_row in enumerate(block) if is_row)
            end = begin + count * row_bytes
            payload = bits.to_bytes(-(-block_size // 8), "little") + hashlib.sha256(rows[begin:end]).digest()
            keys.append(ExtraKey(ExtraKeyKind.PROMPT_EMBEDDING, payload, index))
            begin = end
    return tuple(keys)
