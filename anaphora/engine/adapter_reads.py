"""Adapters that have left memory, read again beside the steps: a slow disk holds up who asked, and nobody else.

    step thread   add_request, adapter away --AdapterAway--> event loop --worker thread: read--> add_request again

Knows adapters and futures; must not know requests. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from anaphora.engine.adapters import Adapter, AdapterInfo


class AdapterAway(Exception):
    """Not an error: an adapter is to be read before its request is added. Never leaves the async engine."""

    def __init__(self, info: AdapterInfo) -> None:
        super().__init__(info.name)
        self.info = info


def only_from(adapters: Mapping[str, Adapter]) -> Callable[[AdapterInfo], Adapter]:
    """What `Engine.add_request` asks for an adapter: one of these, by digest. It raises AdapterAway."""

    def find(info: AdapterInfo) -> Adapter:
        if info.digest not in adapters:
            raise AdapterAway(info)
        return adapters[info.digest]

    return find


class AdapterReads:
    """read: an adapter again, on another thread; may raise AdapterChangedError."""

    def __init__(self, read: Callable[[AdapterInfo], Awaitable[Adapter]]) -> None:
        self._read = read
        self._reading: dict[tuple[str, str], asyncio.Future[Adapter]] = {}

    async def get(self, info: AdapterInfo) -> Adapter:
        """However many ask at once, it is read once. Raises AdapterChangedError."""
        key = info.folder, info.digest
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.ensure_future(self._read(info))
            reading.add_done_callback(lambda _: self._reading.pop(key))
        return await asyncio.shield(reading)
