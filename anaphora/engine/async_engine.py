"""An engine for asyncio code: it hands in requests and receives what they gain.

Knows the engine, the thread that steps it, one event loop and worker threads. Must not know HTTP or tensors.

    event loop                        step thread                        worker threads
    submit, abort, reset  --------->  between two steps, in order
    RequestGroup          <---------  one call for all outputs of a step
    in_worker             ------------------------------------------>    tokenising, rendering
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from anaphora.core.busy_prefixes import BusyPrefix
from anaphora.engine.adapter_reads import AdapterAway, AdapterReads, only_from
from anaphora.engine.adapters import Adapter, AdapterInfo
from anaphora.engine.engine import Engine
from anaphora.engine.outputs import EngineStats, StepOutput
from anaphora.engine.request_group import NewRequest, RequestGroup
from anaphora.engine.step_thread import StepThread
from anaphora.engine.ttft import NOTHING_BEFORE, TtftParts
from anaphora.errors import EngineStoppedError, UnknownRequestError
from anaphora.salt_regions import CacheSalt

_T = TypeVar("_T")
_P = ParamSpec("_P")


class AsyncEngine:
    """An engine for asyncio code. `start` it on the event loop that uses it, `stop` it there.

    num_workers: threads for `in_worker`.
    """

    def __init__(self, engine: Engine, *, num_workers: int = 2) -> None:
        self.engine = engine  # for what never changes; the step thread alone may call what changes anything
        self._steps = StepThread(engine, self._deliver, self._fail_all)
        self._groups: dict[str, RequestGroup] = {}  # by request id; event loop only
        self._num_groups = 0
        self._loop: asyncio.AbstractEventLoop
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="anaphora-text")
        self._adapter_reads = AdapterReads(lambda info: self.in_worker(engine.reread_adapter, info))

    def start(self) -> None:
        """Begin to step. Call once, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._steps.start(self._loop)

    async def stop(self) -> None:
        """End the thread after its step; what still runs fails with EngineStoppedError. Twice is harmless."""
        await self._steps.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def is_running(self) -> bool:
        """Whether the step thread takes requests: it was started, and neither stopped nor crashed."""
        return self._steps.is_running

    @property
    def stats(self) -> EngineStats:
        """As of the last change. Whatever an output that was received has counted is in it."""
        return self._steps.stats

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have neither finished nor been closed."""
        return len(self._groups)

    async def in_worker(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run something slow (tokenising, rendering, parsing) beside the event loop and the steps."""
        return await self._loop.run_in_executor(self._workers, functools.partial(function, *args, **kwargs))

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[NewRequest], *, arrival_s: float | None = None, before: TtftParts = NOTHING_BEFORE
    ) -> RequestGroup:
        """Hand in requests: they reach the engine together, between two steps. See RequestGroup.

        arrival_s: when they arrived, by the engine's clock, if that was before now. before: what was done since.
        """
        arrival_s = self.engine.clock() if arrival_s is None else arrival_s
        request_ids = [f"{self._num_groups}-{index}" for index in range(len(requests))]
        self._num_groups += 1
        group = RequestGroup(request_ids, self._close)
        self._groups |= dict.fromkeys(request_ids, group)
        read: dict[str, Adapter] = {}  # by digest, what had left memory

        def add() -> None:
            added: list[str] = []
            try:
                for request_id, new in zip(request_ids, requests, strict=True):
                    self.engine.add_request(
                        request_id,
                        new.prompt_token_ids,
                        new.sampling,
                        cache_salt=new.cache_salt,
                        priority=new.priority,
                        tenant=new.tenant,
                        adapter=new.adapter,
                        read_again=only_from(read),
                        arrival_s=arrival_s,
                        before=before,
                    )
                    added.append(request_id)
            except Exception:
                self.engine.abort(added)
                raise

        first = self._steps.call(add)
        group.expect(self._loop.create_task(self._accept(group, add, first, read)))
        return group

    async def _accept(
        self, group: RequestGroup, add: Callable[[], None], added: asyncio.Future[None], read: dict[str, Adapter]
    ) -> None:
        """Wait until requests are in. What they need of adapters that have left memory is read beside the steps."""
        while True:
            try:
                return await added
            except AdapterAway as away:
                read[away.info.digest] = await self._adapter_reads.get(away.info)
            if self._groups.keys().isdisjoint(group.request_ids):
                raise EngineStoppedError("the requests were closed, or the engine has stopped, before they were in")
            added = self._steps.call(add)

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget everything cached. False, and no effect, while requests hold blocks. Raises EngineStoppedError."""
        return await self._steps.call(lambda: self.engine.reset_prefix_cache(preempt_running))

    async def busiest_prefixes(self, count: int) -> list[BusyPrefix]:
        """See Engine.busiest_prefixes. Raises EngineStoppedError."""
        return await self._steps.call(lambda: self.engine.busiest_prefixes(count))

    async def forget(
        self, *, salt: CacheSalt | None = None, adapter: str | None = None, prefix: Sequence[int] | None = None
    ) -> int | None:
        """As Engine.forget, for token ids. Raises RequestError, EngineStoppedError."""
        return await self._steps.call(lambda: self.engine.forget(salt=salt, adapter=adapter, prefix=prefix))

    async def update_weights(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, abort_running: bool = False
    ) -> bytes:
        """As Engine.update_weights, on the step thread; the requests that it ends are received with an error.

        Raises WeightsError, EngineStoppedError.
        """
        return await self._steps.call(lambda: self.engine.update_weights(tensors, abort_running=abort_running))

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> AdapterInfo:
        """As Engine.load_adapter; the files are read beside the steps. Raises AdapterError, EngineStoppedError too."""
        adapter = await self.in_worker(self.engine.read_adapter, folder)
        return await self._steps.call(lambda: self.engine.load_adapter(name, folder, replace=replace, adapter=adapter))

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """As Engine.unload_adapter."""
        return await self._steps.call(lambda: self.engine.unload_adapter(name))

    def _close(self, group: RequestGroup) -> None:
        alive = [request_id for request_id in group.request_ids if self._groups.pop(request_id, None) is not None]
        if not alive:
            return

        def abort() -> None:
            for request_id in alive:
                with contextlib.suppress(UnknownRequestError):  # it has just finished, or never got in
                    self.engine.abort(request_id)

        self._steps.post(abort)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        for step in outputs:
            group = self._groups.get(step.request_id)
            if group is None:  # closed while the step ran
                continue
            group.take(step)
            if step.finished:
                del self._groups[step.request_id]

    def _fail_all(self, error: Exception) -> None:
        groups = set(self._groups.values())
        self._groups.clear()
        for group in groups:
            group.fail(error)
