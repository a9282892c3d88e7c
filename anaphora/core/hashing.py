"""What a block is called: canonical bytes, the root of a model, and the chain of hashes of one token sequence.

The byte format is specified in docs/hash-format.md, with golden vectors. This module knows bytes and digests;
it must not know requests, or who asks, nor look at the trail that a chain carries for the index.

    identity of the model --root_digest--> root
                                             |   block 0            block 1
    tokens, extra keys ----------------------+-> H(root, c0) = h0 -> H(h0, c1) = h1 -> ...
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, cast

from anaphora.core.common_length import common_length
from anaphora.core.ids import BlockHash
from anaphora.core.trail import Trail
from anaphora.errors import InvalidParameterError
from anaphora.salt_regions import CacheSalt, SaltRegions, check_salt

FORMAT_VERSION = 1
_ROOT_TAG = b"anaphora/root"
_DIGEST = re.compile("(?:[0-9a-f]{2})+")
_key_header = struct.Struct("<BI").pack
_KEY_HEADER_BYTES = 5
_block_header = struct.Struct("<BII").pack
_CUT_AT_ONCE = 64


class Digest(Protocol):
    def digest(self) -> bytes: ...


HashFunction = Callable[[bytes], Digest]
"""A constructor in `hashlib`'s style: `hash_function(data).digest()`, always of one length."""

sha256: HashFunction = hashlib.sha256


class ExtraKeyKind(IntEnum):
    """The tag of an extra key, so that equal payloads of different kinds differ. Numbers are never reused."""

    SALT = 1
    LORA = 2
    MULTIMODAL = 3
    PROMPT_EMBEDDING = 4
    EPOCH = 5  # of something that was forgotten: core.scopes


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something besides tokens that changes K/V or must not be shared.

    block_index: the block whose content it enters; the chain carries it to every later block.
    Raises InvalidParameterError for values that only equal what they should be (1, 1.0, True; a bytearray).
    """

    kind: ExtraKeyKind
    payload: bytes
    block_index: int = 0

    def __post_init__(self) -> None:
        if type(self.kind) is not ExtraKeyKind:
            raise InvalidParameterError(f"the kind of an extra key must be an ExtraKeyKind, got {self.kind!r}")
        if type(self.payload) is not bytes:
            raise InvalidParameterError(f"the payload of an extra key must be bytes, got {self.payload!r}")
        if type(self.block_index) is not int or self.block_index < 0:
            raise InvalidParameterError(f"an extra key enters a block 0, 1, 2 ..., got {self.block_index!r}")


def salt_key(salt: str, block_index: int = 0) -> ExtraKey:
    """The cache salt, as its exact code points: look-alikes differ. Raises InvalidParameterError."""
    check_salt(salt)
    return ExtraKey(ExtraKeyKind.SALT, salt.encode("utf-8"), block_index)


def salt_keys(cache_salt: CacheSalt | None, block_size: int) -> tuple[ExtraKey, ...]:
    """One key for each salt, in the block that contains its start. Raises InvalidParameterError."""
    if cache_salt is None:
        return ()
    if isinstance(cache_salt, SaltRegions):
        return tuple(salt_key(salt, start // block_size) for start, salt in cache_salt.regions)
    return (salt_key(cache_salt),)


def lora_key(digest: str) -> ExtraKey:
    """A LoRA adapter, by the SHA-256 of its content in hex; the chain carries it from block 0 on.

    Raises InvalidParameterError.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidParameterError(f"an adapter is named by a digest in lower-case hexadecimal digits, got {digest!r}")
    return ExtraKey(ExtraKeyKind.LORA, bytes.fromhex(digest))


def pack_tokens(token_ids: Iterable[int]) -> array[int]:
    """Token ids as unsigned 32-bit integers. Raises OverflowError or TypeError if one does not fit."""
    if type(token_ids) is not list:
        return array("I", token_ids)
    packed = array("I")
    packed.fromlist(token_ids)  # in two thirds of the time
    return packed


def encode_tokens(token_ids: array[int]) -> bytes:
    """Little-endian u32 each, whatever the machine."""
    if sys.byteorder == "big":
        token_ids = array("I", token_ids)
        token_ids.byteswap()
    return token_ids.tobytes()


def encode_extra_keys(keys: Iterable[ExtraKey]) -> bytes:
    """u8 kind, u32 length, payload each, in ascending order of (kind, payload)."""
    ordered = sorted((key.kind, key.payload) for key in keys)
    return b"".join(_key_header(kind, len(payload)) + payload for kind, payload in ordered)


def _by_kind_and_payload(piece: bytes) -> tuple[int, bytes]:
    return piece[0], piece[_KEY_HEADER_BYTES:]


def encode_by_block(keys: Iterable[ExtraKey]) -> dict[int, bytes]:
    """Block index -> encoded extra keys. In one pass, as an image has a key in every block that it touches."""
    encoded: dict[int, bytes] = {}
    crowded: dict[int, list[bytes]] = {}
    for key in keys:
        payload = key.payload
        piece = _key_header(key.kind, len(payload)) + payload
        first = encoded.setdefault(key.block_index, piece)
        if first is not piece:  # a piece is made anew for each key, also for one that is given twice
            crowded.setdefault(key.block_index, [first]).append(piece)
    for index, pieces in crowded.items():
        pieces.sort(key=_by_kind_and_payload)
        encoded[index] = b"".join(pieces)
    return encoded


def root_digest(identity: Mapping[str, str]) -> bytes:
    """SHA-256 of what the model *is* (32 bytes): the parent of every block 0.

    identity: field name -> value, strings only: values that Python calls equal and that mean different
    things (1, 1.0, True) cannot meet here. Raises TypeError.
    """
    parts = [_ROOT_TAG, struct.pack("<BI", FORMAT_VERSION, len(identity))]
    for name in sorted(identity):
        for text in (name, identity[name]):
            if not isinstance(text, str):
                raise TypeError(f"identity holds strings only, got {text!r} in field {name!r}")
            data = text.encode("utf-8")
            parts.append(struct.pack("<I", len(data)) + data)
    return hashlib.sha256(b"".join(parts)).digest()


def _cut(data: bytes, size: int) -> list[bytes]:
    """Pieces of this many bytes: 64 at a time, in a third of the time."""
    count = len(data) // size
    if count <= _CUT_AT_ONCE:
        return list(struct.unpack(f"{size}s" * count, data))
    rest = count % _CUT_AT_ONCE
    pieces: list[bytes] = []
    for group in struct.iter_unpack(f"{size}s" * _CUT_AT_ONCE, data[: (count - rest) * size]):
        pieces += group
    pieces += struct.unpack_from(f"{size}s" * rest, data, (count - rest) * size)
    return pieces


def block_header(parent_length: int, block_size: int) -> bytes:
    """The bytes before the parent: u8 version, u32 length of the parent, u32 length of the encoded tokens."""
    return _block_header(FORMAT_VERSION, parent_length, 4 * block_size)


def _chained(hash_function: HashFunction, header: bytes, parent: bytes, contents: Iterable[bytes]) -> list[BlockHash]:
    """The hash of each block, given the one before the first."""
    hashes: list[bytes] = []
    if hash_function is sha256:  # a new object costs a search for the algorithm in OpenSSL, and a copy does not
        begin, append = hashlib.sha256(header).copy, hashes.append
        for content in contents:
            block = begin()
            block.update(parent)
            block.update(content)
            parent = block.digest()
            append(parent)
    else:
        hashes = [parent := hash_function(header + parent + content).digest() for content in contents]
    return cast("list[BlockHash]", hashes)  # a NewType call per block would cost a tenth of the loop


class BlockChain:
    """The hashes of the full blocks of one token sequence, made once, extended as tokens arrive.

    hashes: one digest a full block. contents: what each was made of besides its parent (encoded tokens,
    then encoded extra keys): the bytes that confirm a hit. Both only grow. token_ids: the sequence itself.
    extra_keys: block index -> encoded extra keys. trail: where its first blocks were, as far as it is known.
    """

    __slots__ = (
        "_has_lists_in_common",
        "_hash_function",
        "block_size",
        "contents",
        "extra_keys",
        "hashes",
        "root",
        "token_ids",
        "trail",
    )

    def __init__(
        self,
        root: bytes,
        block_size: int,
        hash_function: HashFunction = sha256,
        extra_keys: Iterable[ExtraKey] = (),
    ) -> None:
        self.root = root
        self.block_size = block_size
        self.token_ids: array[int] = array("I")
        self.hashes: list[BlockHash] = []
        self.contents: list[bytes] = []
        self.trail: Trail | None = None
        self._hash_function = hash_function
        self._has_lists_in_common = False
        self.extra_keys = encode_by_block(extra_keys) if extra_keys else {}

    def extend(self, token_ids: array[int], max_blocks: int | None = None) -> int:
        """Hash the full blocks that are not hashed yet, at most max_blocks; returns how many.

        token_ids: the whole sequence so far; kept, not copied, so it may grow but not change.
        """
        self.token_ids = token_ids
        block_size, first = self.block_size, len(self.hashes)
        stop = len(token_ids) // block_size
        if max_blocks is not None and stop > first + max_blocks:
            stop = first + max_blocks
        if stop <= first:
            return 0
        if self._has_lists_in_common:
            self.hashes, self.contents, self._has_lists_in_common = self.hashes[:], self.contents[:], False
        data = encode_tokens(token_ids[first * block_size : stop * block_size])
        contents = _cut(data, 4 * block_size) if stop - first > 1 else [data]
        if self.extra_keys:
            for index in self._keyed(first, stop):
                contents[index - first] += self.extra_keys[index]

        hash_function, hashes = self._hash_function, self.hashes
        start = 0
        if first:
            parent: bytes = hashes[-1]
        else:  # the root may be longer than a digest
            parent = hash_function(block_header(len(self.root), block_size) + self.root + contents[0]).digest()
            hashes.append(BlockHash(parent))
            start = 1
        if start < len(contents):
            header, rest = block_header(len(parent), block_size), contents[start:] if start else contents
            hashes += _chained(hash_function, header, parent, rest)
        self.contents += contents
        return stop - first

    def take_lists(self, other: BlockChain) -> None:
        """Have every hash and content in common with a chain of the same blocks, until one of the two is extended."""
        self.hashes, self.contents = other.hashes, other.contents
        self._has_lists_in_common = other._has_lists_in_common = True

    def _keyed(self, first: int, stop: int) -> list[int]:
        """The blocks in [first, stop) with extra keys. A decode step looks at one block, not at every image."""
        if stop - first < len(self.extra_keys):
            return [index for index in range(first, stop) if index in self.extra_keys]
        return [index for index in self.extra_keys if first <= index < stop]

    def num_equally_keyed(self, other: BlockChain) -> int | None:
        """How many leading blocks have the same extra keys in both; None if all have, however many there are."""
        mine, theirs = self.extra_keys, other.extra_keys
        if mine == theirs:
            return None
        return min(index for index in mine.keys() | theirs.keys() if mine.get(index) != theirs.get(index))

    def common_blocks(self, other: BlockChain, limit: int) -> int:
        """How many leading blocks, at most `limit`, are the same by content: exact, whatever the hashes say."""
        if self.root != other.root:
            return 0
        mine, theirs = self.contents, other.contents
        return min(limit, len(mine) if mine == theirs else common_length(mine, theirs, 0))
