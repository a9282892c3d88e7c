"""The one thread that owns an engine and steps it, the way to it and the way back.

Knows the engine, one event loop, and commands; must not know what they are about, or who receives an output.

    event loop                        step thread
    call, post           --inbox-->   between two steps, in order
    outcome, `deliver`   <--loop---   one call for all outputs of a step

Nothing is locked while a step runs. What the loop asks for waits for the end of the step in flight; the statistics do
not: the thread publishes them after every change, before the outputs that they count are delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from anaphora.engine.engine import Engine
from anaphora.engine.outputs import StepOutput
from anaphora.errors import EngineStoppedError

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Command(NamedTuple):
    run: Callable[[], None]  # on the step thread
    refuse: Callable[[Exception], None]  # instead, on any thread, if the step thread has ended


class StepThread:
    """deliver, fail: called on the event loop, with the outputs of a step, and with why none will come any more.

    stats: as of the last change. Whatever an output that was delivered has counted is in it.
    """

    def __init__(
        self, engine: Engine, deliver: Callable[[Sequence[StepOutput]], None], fail: Callable[[Exception], None]
    ) -> None:
        self.stats = engine.stats()
        self._engine = engine
        self._deliver = deliver
        self._fail = fail
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._closing = threading.Lock()  # between putting a command and the end of the thread
        self._closed = False
        self._stop_wanted = False
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="anaphora-steps", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to step. Call once."""
        self._loop = loop
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its step. Twice is harmless."""

        def stop() -> None:
            self._stop_wanted = True

        self._post(_Command(stop, lambda error: None))
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    @property
    def is_running(self) -> bool:
        """Whether it takes commands: it was started, and neither stopped nor crashed."""
        return self._thread.is_alive() and not self._closed

    # -- the way there and back ----------------------------------------------------------------------------------------

    def post(self, function: Callable[[], None]) -> None:
        """Run something on the thread between two steps; nothing happens if it has ended. It must not raise."""

        def run() -> None:
            function()
            self.stats = self._engine.stats()

        self._post(_Command(run, lambda error: None))

    def call(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run something on the thread between two steps; its result or exception goes into the future."""
        outcome: asyncio.Future[_T] = self._loop.create_future()

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
            self.stats = self._engine.stats()
            self._on_loop(settle, result, error)

        self._post(_Command(run, lambda error: self._on_loop(settle, None, error)))
        return outcome

    def _post(self, command: _Command) -> None:
        with self._closing:
            if not self._closed:
                self._inbox.put(command)
                return
        command.refuse(EngineStoppedError("the engine has stopped; start the server again"))

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could be told
            self._loop.call_soon_threadsafe(function, *args)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = EngineStoppedError("the engine was stopped")
        try:
            while not self._stop_wanted:
                self._obey()
                if self._stop_wanted or not self._engine.has_unfinished:
                    continue
                outputs = self._engine.step()
                self.stats = self._engine.stats()
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
        self._on_loop(self._fail, error)

    def _obey(self) -> None:
        """Run the commands that are there; wait for one if there is nothing to step."""
        with contextlib.suppress(queue.Empty):
            block = not self._engine.has_unfinished
            while True:
                self._inbox.get(block=block).run()
                block = False
