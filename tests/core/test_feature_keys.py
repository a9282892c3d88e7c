"""The payloads of images and rows, block by block, as docs/hash-format.md says."""

from __future__ import annotations

import struct
from hashlib import sha256

import pytest

from anaphora.core.feature_keys import embedding_keys, image_keys
from anaphora.core.hashing import ExtraKey, ExtraKeyKind
from anaphora.core.plan import FeatureSpan

A, B = "0a" * 32, "0b" * 32


def image(digest: str, offset: int, length: int, block: int) -> ExtraKey:
    return ExtraKey(ExtraKeyKind.MULTIMODAL, bytes.fromhex(digest) + struct.pack("<iI", offset, length), block)


def test_an_image_is_in_every_block_that_it_touches_and_in_no_other() -> None:
    assert image_keys([FeatureSpan(3, 1, A)], 4) == (image(A, 3, 1, 0),)
    assert image_keys([FeatureSpan(4, 4, A)], 4) == (image(A, 0, 4, 1),)
    assert image_keys([FeatureSpan(3, 6, A)], 4) == (image(A, 3, 6, 0), image(A, -1, 6, 1), image(A, -5, 6, 2))
    two = image_keys([FeatureSpan(0, 2, A), FeatureSpan(2, 3, B)], 4)
    assert two == (image(A, 0, 2, 0), image(B, 2, 3, 0), image(B, -2, 3, 1))


def rows(mask: int, data: bytes, block: int, num_bytes: int = 1) -> ExtraKey:
    payload = mask.to_bytes(num_bytes, "little") + sha256(data).digest()
    return ExtraKey(ExtraKeyKind.PROMPT_EMBEDDING, payload, block)


def test_rows_are_in_their_own_block_with_the_places_that_they_have() -> None:
    mask = [True, False, True, False, False, False, False, False, False, True]
    assert embedding_keys(mask, b"aabbcc", 4) == (rows(0b0101, b"aabb", 0), rows(0b0010, b"cc", 2))
    assert embedding_keys([False] * 9 + [True], b"aa", 10) == (rows(1 << 9, b"aa", 0, 2),)
    assert embedding_keys([False] * 4, b"", 4) == ()


def test_bytes_that_are_no_whole_rows_are_refused() -> None:
    for mask, data in (([True, True], b"abc"), ([False], b"a")):
        with pytest.raises(ValueError, match="no"):
            embedding_keys(mask, data, 4)
