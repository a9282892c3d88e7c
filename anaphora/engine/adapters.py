"""The LoRA adapters of one engine: what each name stands for, which of them are in memory, who uses them.

Knows names, folders and digests; must not know tensors. A name stands for content: a request takes the adapter that its
name stands for when it comes in, and keeps it to its end, whatever the name stands for by then.

    name --load--> digest --in memory, or read again on use--> executor
                     ^
    request --holds--+   until it ends
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from anaphora.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterFileError,
    AdapterLimitError,
    ConfigError,
    DuplicateAdapterError,
    InvalidParameterError,
    UnknownAdapterError,
)

MAX_NAME_CHARS = 256

_logger = logging.getLogger(__name__)


class Adapter(Protocol):
    """What was read from an adapter's files. digest: SHA-256 of what it computes, in hex."""

    @property
    def digest(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class AdapterHolder(Protocol):
    """The part of an executor that holds adapters, of the kind that the reader of the same engine gives."""

    def add_adapter(self, adapter: Any) -> None: ...

    def remove_adapter(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that is loaded. folder: absolute. digest: its identity. num_bytes: in memory, when it is there."""

    name: str
    folder: str
    digest: str
    rank: int
    num_bytes: int


class AdapterRegistry:
    """Names of adapters, and at most max_loras adapters in memory, those that requests use among them.

    read: a folder to an adapter, or an AdapterError; from any thread. What no request uses leaves memory least recently
    used first, and is read again on use. Raises ConfigError.
    """

    def __init__(self, read: Callable[[str], Adapter], holder: AdapterHolder, *, max_loras: int) -> None:
        if max_loras < 1:
            raise ConfigError(f"max_loras must be at least 1, got {max_loras}")
        self._read = read
        self._holder = holder
        self._max_loras = max_loras
        self._named: dict[str, AdapterInfo] = {}
        self._num_users: dict[str, int] = {}  # by digest: the adapters in memory, least recently used first
        self._infos: tuple[AdapterInfo, ...] = ()

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """What is loaded, by name; a snapshot that any thread may take."""
        return self._infos

    def read(self, folder: str | os.PathLike[str]) -> Adapter:
        """What `load` takes besides a name; slow, from any thread. Raises AdapterError."""
        return self._read(_absolute(folder))

    def read_again(self, info: AdapterInfo) -> Adapter:
        """An adapter that has left memory; slow, from any thread. Raises AdapterChangedError."""
        try:
            adapter = self._read(info.folder)
        except AdapterError as error:
            _logger.warning("adapter %r cannot be read again", info.name, exc_info=error)  # who asks sees no folder
            raise AdapterChangedError(
                f"adapter {info.name!r} had left memory and cannot be read again: load it anew"
            ) from error
        if adapter.digest != info.digest:
            raise AdapterChangedError(
                f"adapter {info.name!r} had left memory and its files have changed since it was loaded: load it anew"
            )
        return adapter

    def load(self, name: str, folder: str | os.PathLike[str], adapter: Adapter, *, replace: bool) -> AdapterInfo:
        """Let a name stand for an adapter that was read. Requests that came before keep what it stood for.

        Raises DuplicateAdapterError, InvalidParameterError.
        """
        _check_name(name)
        previous = self._named.get(name)
        if previous is not None and not replace:
            raise DuplicateAdapterError(f"an adapter named {name!r} is loaded: unload it first, or ask to replace it")
        info = AdapterInfo(name, _absolute(folder), adapter.digest, adapter.rank, adapter.num_bytes)
        self._named[name] = info
        if previous is not None:
            self._drop_if_idle(previous.digest)
        if adapter.digest in self._num_users or self._make_room():
            self._put(adapter)
        self._publish()
        return info

    def unload(self, name: str) -> AdapterInfo:
        """Forget a name. Raises UnknownAdapterError."""
        info = self._find(name)
        del self._named[name]
        self._drop_if_idle(info.digest)
        self._publish()
        return info

    @contextmanager
    def acquired(self, name: str, read_again: Callable[[AdapterInfo], Adapter] | None = None) -> Iterator[str]:
        """One more request with this adapter; gives its digest.

        If the block succeeds, `release` ends it, else nothing is kept.

        read_again: gives one that has left memory, or raises what the caller wants to get; None reads it here and now.
        Raises UnknownAdapterError, AdapterLimitError, AdapterChangedError.
        """
        info = self._find(name)
        if info.digest not in self._num_users:
            if not self._make_room():
                raise AdapterLimitError(
                    f"{self._max_loras} adapters (max_loras) are in use by requests; wait until some end, or raise it"
                )
            self._put((read_again or self.read_again)(info))
        self._num_users[info.digest] = self._num_users.pop(info.digest) + 1  # the last in line is the latest used
        try:
            yield info.digest
        except BaseException:
            self.release(info.digest)
            raise

    def release(self, digest: str) -> None:
        """One request less."""
        self._num_users[digest] -= 1
        self._drop_if_idle(digest)

    def _find(self, name: str) -> AdapterInfo:
        info = self._named.get(name) if isinstance(name, str) else None
        if info is None:
            known = ", ".join(self._named) or "none"
            raise UnknownAdapterError(f"no adapter named {name!r} is loaded; loaded are: {known[:400]}")
        return info

    def _put(self, adapter: Adapter) -> None:
        if adapter.digest not in self._num_users:
            self._holder.add_adapter(adapter)
        self._num_users[adapter.digest] = self._num_users.pop(adapter.digest, 0)

    def _make_room(self) -> bool:
        """Whether one more adapter may come into memory; one that nobody uses leaves if it has to."""
        if len(self._num_users) >= self._max_loras:
            idle = next((digest for digest, num_users in self._num_users.items() if num_users == 0), None)
            if idle is None:
                return False
            self._remove(idle)
        return True

    def _drop_if_idle(self, digest: str) -> None:
        """Nobody can ask for an adapter without a name: it leaves memory with its last request."""
        is_named = any(info.digest == digest for info in self._named.values())
        if self._num_users.get(digest) == 0 and not is_named:
            self._remove(digest)

    def _remove(self, digest: str) -> None:
        del self._num_users[digest]
        self._holder.remove_adapter(digest)

    def _publish(self) -> None:
        self._infos = tuple(self._named[name] for name in sorted(self._named))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidParameterError(f"an adapter's name must be 1 to {MAX_NAME_CHARS} printable characters")


def _absolute(folder: str | os.PathLike[str]) -> str:
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise AdapterFileError(f"an adapter's folder must be a path, got {folder!r}")
    return os.path.abspath(os.path.expanduser(path))
