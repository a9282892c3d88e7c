"""What was forgotten: salts, adapters and prefixes whose cached blocks no later request may find.

Forgetting gives a scope a new **epoch**, a number that was never used before. It enters the extra keys of requests that
come later, so their blocks have other names and nothing of before can be hit, whether it was computed before or is
computed after by requests that still run. Nothing in the pool is touched: the old blocks go by eviction.

    salt, adapter    its epoch enters the block that the salt or adapter enters
    prefix           its epoch enters its last full block, in every chain that passes through that block's hash

An epoch of a scope only ever rises, whatever this table forgets, so old blocks never come back. Knows keys and hashes;
must not know blocks, requests or texts.
"""

from __future__ import annotations

import struct
from binascii import crc32
from collections import OrderedDict
from collections.abc import Callable, Sequence

from anaphora.core.hashing import ExtraKey, ExtraKeyKind
from anaphora.core.ids import BlockHash
from anaphora.errors import InvalidParameterError

_SCOPES = (ExtraKeyKind.SALT, ExtraKeyKind.LORA)
_PREFIX = 0  # stands where the kind of a key stands, which is never 0
_NUM_FLOORS = 4096
_SLACK = 64


class Scopes:
    """max_scopes: salts and adapters remembered one by one, those forgotten last. Of the others the epoch is the latest
    of any that shares one of 4,096 places: to be pushed out of the table costs some of them a miss, and nothing else.
    max_prefixes: prefixes that were forgotten and of which something is still cached, or still computed. To leave the
    table costs a miss of what was computed since.
    last: how often something was forgotten; the latest epoch.
    """

    def __init__(self, max_scopes: int = 65_536, max_prefixes: int = 65_536) -> None:
        self._max_scopes = max_scopes
        self._max_prefixes = max_prefixes
        self._epochs: OrderedDict[bytes, int] = OrderedDict()  # in the order of their epochs
        self._floors: dict[int, int] = {}
        self._prefixes: dict[BlockHash, int] = {}
        self._prune_above = _SLACK
        self.last = 0

    def __len__(self) -> int:
        return len(self._epochs) + len(self._prefixes)

    # -- salts and adapters --------------------------------------------------------------------------------------------

    def forget(self, key: ExtraKey) -> None:
        """A salt or an adapter, wherever in a prompt it begins. O(1)."""
        scope = _scope(key)
        self.last += 1
        self._epochs[scope] = self.last
        self._epochs.move_to_end(scope)
        if len(self._epochs) > self._max_scopes:
            oldest, epoch = self._epochs.popitem(last=False)
            place = crc32(oldest) % _NUM_FLOORS
            self._floors[place] = max(epoch, self._floors.get(place, 0))

    def _epoch(self, scope: bytes) -> int:
        return max(self._epochs.get(scope, 0), self._floors.get(crc32(scope) % _NUM_FLOORS, 0))

    def stamp(self, keys: Sequence[ExtraKey]) -> tuple[ExtraKey, ...]:
        """The keys, and for each salt or adapter that was forgotten its epoch, in the same block."""
        if not self._epochs:
            return tuple(keys)
        stamps = []
        for key in keys:
            if key.kind in _SCOPES and (epoch := self._epoch(_scope(key))):
                stamps.append(_stamp(epoch, _scope(key), key.block_index))
        return (*keys, *stamps)

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def forget_prefix(
        self, block_hash: BlockHash, is_cached: Callable[[BlockHash], bool], oldest_alive: int | None
    ) -> None:
        """Everything that goes through the block of this name. O(1), amortised.

        is_cached: whether a block of this name can be found. oldest_alive: `last` when the oldest live request was
        registered; None if none is alive. Raises InvalidParameterError if the table is full.
        """
        self.last += 1
        self._prefixes[block_hash] = self.last
        if len(self._prefixes) > min(self._prune_above, self._max_prefixes):
            self._prune(is_cached, oldest_alive)
        if len(self._prefixes) > self._max_prefixes:
            del self._prefixes[block_hash]
            raise InvalidParameterError(
                f"{self._max_prefixes} forgotten prefixes are cached or computed still: wait, or reset the cache"
            )

    def _prune(self, is_cached: Callable[[BlockHash], bool], oldest_alive: int | None) -> None:
        """Drop prefixes that nobody can find and no request of before can compute again."""
        self._prefixes = {
            block_hash: epoch
            for block_hash, epoch in self._prefixes.items()
            if is_cached(block_hash) or (oldest_alive is not None and oldest_alive < epoch)
        }
        self._prune_above = 2 * len(self._prefixes) + _SLACK

    def cut(self, hashes: Sequence[BlockHash], start: int, stop: int, epoch: int | None = None) -> int | None:
        """The first block of a chain in [start, stop) that ends a forgotten prefix; None if there is none.

        epoch: of those prefixes alone that were forgotten up to then.
        """
        prefixes = self._prefixes
        if not prefixes or prefixes.keys().isdisjoint(hashes):
            return None
        last = self.last if epoch is None else epoch
        return next(
            (i for i in range(start, min(stop, len(hashes))) if prefixes.get(hashes[i], last + 1) <= last), None
        )

    def prefix_stamp(self, block_hash: BlockHash, block_index: int) -> ExtraKey:
        """What enters the block that ends a forgotten prefix."""
        return _stamp(self._prefixes[block_hash], bytes([_PREFIX]) + block_hash, block_index)


def _scope(key: ExtraKey) -> bytes:
    return bytes([key.kind]) + key.payload


def _stamp(epoch: int, scope: bytes, block_index: int) -> ExtraKey:
    """u64 epoch, then whose it is: u8 kind and payload of the key, or 0 and the block's hash."""
    return ExtraKey(ExtraKeyKind.EPOCH, struct.pack("<Q", epoch) + scope, block_index)
