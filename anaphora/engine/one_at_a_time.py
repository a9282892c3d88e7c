"""Calls of an engine come one at a time, and none comes after its bookkeeping was broken off. Knows locks only."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from anaphora.errors import EngineBusyError, EngineStoppedError

M = TypeVar("M", bound=Callable[..., Any])


class OneAtATime:
    """What an object needs so that its methods can be `exclusive`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._broken: BaseException | None = None

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Whatever is raised inside (a signal handler's exception, a bug) leaves the state half done: stop for good."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise

    @contextmanager
    def call(self) -> Iterator[None]:
        """Raises EngineBusyError inside another call, EngineStoppedError after broken bookkeeping."""
        if not self._lock.acquire(blocking=False):
            raise EngineBusyError(
                "another call of this engine is running: make one call at a time, from one thread, or use AsyncEngine"
            )
        try:
            if self._broken is not None:
                raise EngineStoppedError(
                    f"the engine was broken off in its bookkeeping by {type(self._broken).__name__}: make a new one"
                ) from self._broken
            yield
        finally:
            self._lock.release()


def exclusive(method: M) -> M:
    """A method that runs under `self.calls`, a OneAtATime."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.calls.call():
            return method(self, *args, **kwargs)

    return cast(M, run)
