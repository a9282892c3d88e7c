"""Requests on their way to an engine's thread, and what they gain on its way back. Knows one event loop; no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anaphora.engine.multimodal import TokenPrompt
from anaphora.engine.outputs import StepOutput
from anaphora.salt_regions import CacheSalt
from anaphora.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What `Engine.add_request` needs of one request, tokenised already."""

    prompt_token_ids: TokenPrompt
    sampling: SamplingParams
    cache_salt: CacheSalt | None = None
    priority: int = 0
    tenant: str | None = None
    adapter: str | None = None


class RequestGroup:
    """Requests that were submitted together and are received together. Belongs to the event loop.

    All of them are accepted or none is. Close it, whatever happened: that ends what still runs. close: what does so.
    """

    def __init__(self, request_ids: Sequence[str], close: Callable[[RequestGroup], None]) -> None:
        self.request_ids = tuple(request_ids)
        self._close = close
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._accepted: asyncio.Future[None]  # set by `expect`
        self._received: list[tuple[int, StepOutput]] = []
        self._unfinished = set(request_ids)
        self._news = asyncio.Event()
        self._error: Exception | None = None

    async def accepted(self) -> None:
        """Wait until the engine has taken the requests. Raises RequestError, EngineStoppedError."""
        await asyncio.shield(self._accepted)

    async def receive(self) -> list[tuple[int, StepOutput]]:
        """What the requests gained since the last call, each with its index in the group; waits for something.

        Empty once all have finished. Cancelling the call loses nothing. Raises EngineStoppedError.
        """
        while not self._received:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return []
            self._news.clear()
            await self._news.wait()
        received, self._received = self._received, []
        self._unfinished.difference_update(step.request_id for _, step in received if step.finished)
        return received

    def close(self) -> None:
        """Abort what has not finished. Harmless when all have."""
        self._close(self)

    # -- for who runs them ---------------------------------------------------------------------------------------------

    def expect(self, accepted: asyncio.Future[None]) -> None:
        """Done when the engine has taken the requests, or has not."""
        accepted.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
        self._accepted = accepted

    def take(self, step: StepOutput) -> None:
        """One of the requests has gained something."""
        self._received.append((self._index[step.request_id], step))
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self._error = error
        self._news.set()
