"""A request from its first byte to the engine: who sent it, when, and what was done with it since. Knows a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from anaphora.engine.protocols import Clock
from anaphora.engine.ttft import TtftParts
from anaphora.server.tenants import Caller

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Arrival:
    """clock: the engine's. arrival_s: now, by it."""

    def __init__(self, caller: Caller, clock: Clock) -> None:
        self.caller = caller
        self.arrival_s = clock()
        self._clock = clock
        self._receive_s = 0.0
        self._tokenize_s = 0.0

    def received(self) -> None:
        """The body is here."""
        self._receive_s = self._clock() - self.arrival_s

    def tokenizing(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """The same function, part of making tokens of the body; its time is taken on whatever thread it runs."""

        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            begin_s = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._tokenize_s += self._clock() - begin_s

        return timed

    @property
    def parts(self) -> TtftParts:
        """So far, without what it waited."""
        return TtftParts(receive_s=self._receive_s, tokenize_s=self._tokenize_s)
