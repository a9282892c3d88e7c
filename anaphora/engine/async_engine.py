"""One thread owns an engine and steps it; asyncio code hands it requests and receives what they gain.

Knows the engine, one event loop and threads. Must not know HTTP or tensors.

    event loop                        step thread                        worker threads
    submit, abort, reset  --inbox-->  between two steps, in order
    RequestGroup          <--loop---  one call for all outputs of a step
    in_worker             ------------------------------------------>    tokenising, rendering

Nothing is locked while a step runs. What the loop asks for waits for the end of the step in flight; the statistics do
not: the thread publishes them after every change, before the outputs that they count are delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

from anaphora.core.busy_prefixes import BusyPrefix
from anaphora.engine.adapter_reads import AdapterAway, AdapterReads, only_from
from anaphora.engine.adapters import Adapter, AdapterInfo
from anaphora.engine.engine import Engine
from anaphora.engine.multimodal import TokenPrompt
from anaphora.engine.outputs import EngineStats, StepOutput
from anaphora.engine.ttft import NOTHING_BEFORE, TtftParts
from anaphora.errors import EngineStoppedError, UnknownRequestError
from anaphora.salt_regions import CacheSalt
from anaphora.sampling_params import SamplingParams

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What `Engine.add_request` needs of one request, tokenised already."""

    prompt_token_ids: TokenPrompt
    sampling: SamplingParams
    cache_salt: CacheSalt | None = None
    priority: int = 0
    tenant: str | None = None
    adapter: str | None = None


class _Command(NamedTuple):
    run: Callable[[], None]  # on the step thread
    refuse: Callable[[Exception], None]  # instead, on any thread, if the step thread has ended


class RequestGroup:
    """Requests that were submitted together and are received together. Belongs to the event loop.

    All of them are accepted or none is. Close it, whatever happened: that ends what still runs.
    """

    def __init__(self, owner: AsyncEngine, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        self._owner = owner
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._accepted: asyncio.Future[None]
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
        self._owner._close(self)

    def _take(self, step: StepOutput) -> None:
        self._received.append((self._index[step.request_id], step))
        self._news.set()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()


class AsyncEngine:
    """An engine for asyncio code. `start` it on the event loop that uses it, `stop` it there.

    num_workers: threads for `in_worker`.
    """

    def __init__(self, engine: Engine, *, num_workers: int = 2) -> None:
        self.engine = engine  # for what never changes; the step thread alone may call what changes anything
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._closing = threading.Lock()  # between putting a command and the end of the thread
        self._closed = False
        self._stop_wanted = False
        self._groups: dict[str, RequestGroup] = {}  # by request id; event loop only
        self._num_groups = 0
        self._stats = engine.stats()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="anaphora-steps", daemon=True)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="anaphora-text")
        self._adapter_reads = AdapterReads(lambda info: self.in_worker(engine.reread_adapter, info))

    def start(self) -> None:
        """Begin to step. Call once, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its step; what still runs fails with EngineStoppedError. Twice is harmless."""

        def stop() -> None:
            self._stop_wanted = True

        self._post(_Command(stop, lambda error: None))
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def is_running(self) -> bool:
        """Whether the step thread takes requests: it was started, and neither stopped nor crashed."""
        return self._thread.is_alive() and not self._closed

    @property
    def stats(self) -> EngineStats:
        """As of the last change. Whatever an output that was received has counted is in it."""
        return self._stats

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
        group = RequestGroup(self, request_ids)
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

        first: asyncio.Future[None] = self._loop.create_future()
        self._call(add, first)
        group._accepted = self._loop.create_task(self._accept(group, add, first, read))
        group._accepted.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
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
            added = self._loop.create_future()
            self._call(add, added)

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget everything cached. False, and no effect, while requests hold blocks. Raises EngineStoppedError."""
        done: asyncio.Future[bool] = self._loop.create_future()
        self._call(lambda: self.engine.reset_prefix_cache(preempt_running), done)
        return await done

    async def busiest_prefixes(self, count: int) -> list[BusyPrefix]:
        """See Engine.busiest_prefixes. Raises EngineStoppedError."""
        done: asyncio.Future[list[BusyPrefix]] = self._loop.create_future()
        self._call(lambda: self.engine.busiest_prefixes(count), done)
        return await done

    async def forget(
        self, *, salt: CacheSalt | None = None, adapter: str | None = None, prefix: Sequence[int] | None = None
    ) -> int | None:
        """As Engine.forget, for token ids. Raises RequestError, EngineStoppedError."""
        done: asyncio.Future[int | None] = self._loop.create_future()
        self._call(lambda: self.engine.forget(salt=salt, adapter=adapter, prefix=prefix), done)
        return await done

    async def update_weights(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, abort_running: bool = False
    ) -> bytes:
        """As Engine.update_weights, on the step thread; the requests that it ends are received with an error.

        Raises WeightsError, EngineStoppedError.
        """
        root: asyncio.Future[bytes] = self._loop.create_future()
        self._call(lambda: self.engine.update_weights(tensors, abort_running=abort_running), root)
        return await root

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> AdapterInfo:
        """As Engine.load_adapter; the files are read beside the steps. Raises AdapterError, EngineStoppedError too."""
        adapter = await self.in_worker(self.engine.read_adapter, folder)
        loaded: asyncio.Future[AdapterInfo] = self._loop.create_future()
        self._call(lambda: self.engine.load_adapter(name, folder, replace=replace, adapter=adapter), loaded)
        return await loaded

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """As Engine.unload_adapter."""
        unloaded: asyncio.Future[AdapterInfo] = self._loop.create_future()
        self._call(lambda: self.engine.unload_adapter(name), unloaded)
        return await unloaded

    def _close(self, group: RequestGroup) -> None:
        alive = [request_id for request_id in group.request_ids if self._groups.pop(request_id, None) is not None]
        if not alive:
            return

        def abort() -> None:
            for request_id in alive:
                with contextlib.suppress(UnknownRequestError):  # it has just finished, or never got in
                    self.engine.abort(request_id)
            self._stats = self.engine.stats()

        self._post(_Command(abort, lambda error: None))

    # -- the way to the step thread and back ---------------------------------------------------------------------------

    def _call(self, function: Callable[[], _T], outcome: asyncio.Future[_T]) -> None:
        """Run something on the step thread between two steps; its result or exception goes into the future."""

        def settle(result: _T | None, error: Exception | None) -> None:
            if outcome.done():  # cancelled by who waited
                return
            if error is not None:
                outcome.set_exception(error)
                outcome.exception()  # a caller that has left needs no "exception was never retrieved"
            else:
                outcome.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result: _T | None = None
            error: Exception | None = None
            try:
                result = function()
            except Exception as failure:
                error = failure
            self._stats = self.engine.stats()
            self._on_loop(settle, result, error)

        self._post(_Command(run, lambda error: self._on_loop(settle, None, error)))

    def _post(self, command: _Command) -> None:
        with self._closing:
            if not self._closed:
                self._inbox.put(command)
                return
        command.refuse(EngineStoppedError("the engine has stopped; start the server again"))

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could be told
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        for step in outputs:
            group = self._groups.get(step.request_id)
            if group is None:  # closed while the step ran
                continue
            group._take(step)
            if step.finished:
                del self._groups[step.request_id]

    def _fail_all(self, error: Exception) -> None:
        groups = set(self._groups.values())
        self._groups.clear()
        for group in groups:
            group._fail(error)

    # -- the step thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = EngineStoppedError("the engine was stopped")
        try:
            while not self._stop_wanted:
                self._obey()
                if self._stop_wanted or not self.engine.has_unfinished:
                    continue
                outputs = self.engine.step()
                self._stats = self.engine.stats()
                if outputs:
                    self._on_loop(self._deliver, outputs)
        except BaseException as crash:
            _logger.critical("the engine's thread crashed: every request fails", exc_info=crash)
            error = EngineStoppedError(f"the engine's thread crashed: {type(crash).__name__}: {crash}")
        with self._closing:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait().refuse(error)
        self._on_loop(self._fail_all, error)

    def _obey(self) -> None:
        """Run the commands that are there; wait for one if there is nothing to step."""
        with contextlib.suppress(queue.Empty):
            block = not self.engine.has_unfinished
            while True:
                self._inbox.get(block=block).run()
                block = False
