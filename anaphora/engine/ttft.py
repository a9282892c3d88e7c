"""Where one request's time to first token goes: every moment from its arrival on belongs to exactly one part.

Knows a clock and the states that a request enters; decides nothing. The scheduler has no clock: it says when a state is
entered (`Request.on_state`), and the engine says what is done with the requests that run.

    arrival    add_request    first step                            n-th step
    [ before )[ lookup      )[ queue | lookup | follow | queue ... )[ other | compute | sample | other ) first token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from types import MappingProxyType

from anaphora.core.request import RequestState
from anaphora.engine.protocols import Clock


@dataclass(frozen=True, slots=True)
class TtftParts:
    """Seconds; their sum is the time to first token.

    receive_s: a server reads the body. tokenize_s: parsing, rendering and tokenising. queue_s: the request waits: for a
    thread, for the step in flight, to be admitted, again after a preemption. lookup_s: hashing, look-ups, taking
    blocks. follow_s: it waits for another request that computes the same beginning.
    compute_s, sample_s: the executor's calls that the request takes part in, also those that a preemption undid; the
    share of choosing tokens for the batch is the executor's own account. other_s: whatever is left: checks, the
    planning for others, commits, text, hand-over between threads.
    """

    receive_s: float = 0.0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    lookup_s: float = 0.0
    follow_s: float = 0.0
    compute_s: float = 0.0
    sample_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        return float(sum(astuple(self)))

    def until(self, total_s: float) -> TtftParts:
        """The same for somebody who has the token later; the difference is `other_s`."""
        return replace(self, other_s=self.other_s + total_s - self.total_s)


NOTHING_BEFORE = TtftParts()

_PART_OF: Mapping[RequestState, str] = MappingProxyType(
    {
        RequestState.WAITING: "queue_s",
        RequestState.LOOKING_UP: "lookup_s",
        RequestState.FOLLOWING: "follow_s",
        RequestState.RUNNING: "other_s",
        RequestState.FINISHED: "other_s",
    }
)


class TtftClock:
    """The parts of one request.

    begin_s: when the engine took it up. arrival_s: when it arrived. before: what was done with it in between; the rest
    of that time it has waited.
    """

    __slots__ = ("_clock", "_part", "_seconds", "_since_s")

    def __init__(self, clock: Clock, begin_s: float, arrival_s: float, before: TtftParts) -> None:
        self._clock = clock
        self._since_s = begin_s
        self._seconds: dict[str, float] = asdict(before)
        self._seconds["queue_s"] += begin_s - arrival_s - before.total_s
        self._part = "other_s"

    def enter(self, part: str, now_s: float | None = None) -> None:
        """What follows belongs to this field of TtftParts."""
        now_s = self._clock() if now_s is None else now_s
        self._seconds[self._part] += now_s - self._since_s
        self._since_s = now_s
        self._part = part

    def enter_state(self, state: RequestState) -> None:
        """The scheduler moves the request on."""
        self.enter(_PART_OF[state])

    def executed(self, now_s: float, sample_s: float) -> None:
        """The executor's call has ended; sample_s of it, as it says, went into choosing tokens."""
        self.enter("sample_s", max(now_s - sample_s, self._since_s))
        self.enter("other_s", now_s)

    def stop(self, now_s: float) -> TtftParts:
        """The first token is there; what comes after belongs to no part."""
        self.enter("other_s", now_s)
        return TtftParts(**self._seconds)
