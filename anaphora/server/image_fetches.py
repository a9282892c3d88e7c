"""Images of requests that are elsewhere, fetched on threads of their own: a server that does not answer holds up nobody
who names no such image.

Knows threads and how one request's images are fetched; must not know conversations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from anaphora.engine.multimodal import NamedImage
from anaphora.server.config import ServerConfig
from anaphora.server.name_lookup import NameLookup
from anaphora.server.remote_images import RemoteImages

NewFetch = Callable[[], Callable[[NamedImage], bytes]]
"""Begins the time of one request; gives what fetches its images one after the other."""


class ImageFetches:
    """At most `max_image_fetches` requests' images at a time; to wait for a thread is part of a request's time."""

    def __init__(self, config: ServerConfig, begin: NewFetch | None = None) -> None:
        names = NameLookup()
        self._begin = begin or (lambda: RemoteImages(config, names).fetch)
        self._threads = ThreadPoolExecutor(config.max_image_fetches, thread_name_prefix="anaphora-images")

    async def fetch(self, images: Sequence[NamedImage]) -> dict[str, bytes]:
        """What each URL holds, by the image's field. Raises InvalidParameterError."""
        fetch = self._begin()

        def all_of_them() -> dict[str, bytes]:
            return {image.field: fetch(image) for image in images}

        return await asyncio.get_running_loop().run_in_executor(self._threads, all_of_them)

    def stop(self) -> None:
        """What waits for a thread is given up; what is being fetched ends by itself, within its time."""
        self._threads.shutdown(wait=False, cancel_futures=True)
