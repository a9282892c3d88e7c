"""Hash functions that collide, for tests of what confirms a hit."""

from __future__ import annotations

from hashlib import sha256

from anaphora.core.hashing import Digest


class Fixed:
    """A digest that is given."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def digest(self) -> bytes:
        return self._digest


def constant(data: bytes) -> Digest:
    """Every block has the same hash, and it is empty."""
    return Fixed(b"")


def one_bit(data: bytes) -> Digest:
    """Two hashes for everything."""
    return Fixed(bytes([sha256(data).digest()[0] & 1]))


def one_byte(data: bytes) -> Digest:
    return Fixed(sha256(data).digest()[:1])


def parent_blind(data: bytes) -> Digest:
    """Hashes the last four bytes: one token. Equal blocks have equal hashes wherever they stand."""
    return Fixed(sha256(data[-4:]).digest())
