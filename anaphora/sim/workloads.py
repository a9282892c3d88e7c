"""Made-up traffic with a seed: what a trace of a certain kind of application looks like. Same arguments, same trace.

    kind            a request
    shared-prefix   [ one of `groups` prefixes: shared )[ own )
    chat            [ one of `groups` system prompts: shared )[ own )[ output )[ own ) ...   each time a turn more
    agents          as chat: many quick steps, long instructions, `own` is what a tool returned
    rag             [ some of `groups` documents: shared each )[ own: the question )

Requests (of chat and agents: sessions) arrive as a Poisson process; which prefix or document comes is Zipf-distributed;
lengths are drawn around their means. Tokens are random numbers, so what differs here differs there. Knows no model.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, count
from random import Random

from anaphora.errors import ConfigError
from anaphora.sim.numbering import BlockNumbering
from anaphora.sim.request_log import DEFAULT_BLOCK_SIZE
from anaphora.sim.trace import Trace, TraceRequest

MAX_REQUESTS = 1_000_000
MAX_MEAN_TOKENS = 100_000
MAX_SHARED_TOKENS = 100_000_000
_ZIPF_EXPONENT = 1.0
_SPREAD = 0.6  # of the logarithm of a length


@dataclass(frozen=True, slots=True)
class Workload:
    """What to make. rate: requests a second, on average. The lengths are means, in tokens.

    groups: prefixes, system prompts or documents. turns: requests of a session on average. pause_s: between two turns.
    num_parts: documents of one prompt. Raises ConfigError.
    """

    kind: str
    groups: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    turns: int = 1
    pause_s: float = 0.0
    num_parts: int = 1
    requests: int = 1000
    rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"groups": 100_000, "requests": MAX_REQUESTS, "turns": 1000, "num_parts": 100} | dict.fromkeys(
            ("shared_tokens", "own_tokens", "output_tokens"), MAX_MEAN_TOKENS
        )
        for name, most in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name} of a workload must be an integer in [1, {most:,}], got {value!r}")
        if self.groups * self.shared_tokens > MAX_SHARED_TOKENS:
            raise ConfigError(f"groups * shared_tokens of a workload must be at most {MAX_SHARED_TOKENS:,}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"rate of a workload must be requests a second > 0, got {self.rate!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed of a workload must be an integer, got {self.seed!r}")


KINDS = (
    Workload("shared-prefix", groups=16, shared_tokens=1024, own_tokens=128, output_tokens=128),
    Workload("chat", groups=4, shared_tokens=512, own_tokens=96, output_tokens=256, turns=5, pause_s=30.0),
    Workload("agents", groups=4, shared_tokens=3072, own_tokens=384, output_tokens=96, turns=15, pause_s=2.0),
    Workload("rag", groups=500, shared_tokens=768, own_tokens=48, output_tokens=192, num_parts=4),
)


def workload(
    kind: str,
    *,
    requests: int | None = None,
    rate: float | None = None,
    seed: int | None = None,
    groups: int | None = None,
    shared_tokens: int | None = None,
    own_tokens: int | None = None,
    output_tokens: int | None = None,
) -> Workload:
    """One of KINDS, changed where a value is given. Raises ConfigError."""
    found = {made.kind: made for made in KINDS}.get(kind)
    if found is None:
        raise ConfigError(f"a workload must be one of {', '.join(made.kind for made in KINDS)}, got {kind!r}")
    values = {
        "requests": requests,
        "rate": rate,
        "seed": seed,
        "groups": groups,
        "shared_tokens": shared_tokens,
        "own_tokens": own_tokens,
        "output_tokens": output_tokens,
    }
    changes = {name: value for name, value in values.items() if value is not None}
    return replace(found, **changes)  # type: ignore[arg-type]


def generate_trace(wanted: Workload, block_size: int = DEFAULT_BLOCK_SIZE) -> Trace:
    """The first `requests` arrivals. What is generated has ids, so that the next turn of a session may hit it."""
    numbering = BlockNumbering(block_size)
    requests: list[TraceRequest] = []
    for time_s, tokens, input_length in _arrivals(wanted):
        hash_ids, output_hash_ids = numbering.ids(tokens[:-1], input_length)
        output_length = len(tokens) - input_length
        time_ms = round(time_s * 1000, 3)
        requests.append(TraceRequest(time_ms, input_length, output_length, hash_ids, output_hash_ids))
        if len(requests) == wanted.requests:
            break
    return Trace(f"{wanted.kind}, seed {wanted.seed}", block_size, tuple(requests))


class _Session:
    """A prompt that grows by its output and the next input. shared: what it begins with."""

    def __init__(self, wanted: Workload, draw: _Draw, shared: array[int]) -> None:
        self.num_turns = draw.turns(wanted.turns)
        self._wanted = wanted
        self._draw = draw
        self._tokens = shared

    def next_turn(self) -> tuple[array[int], int]:
        """(tokens of prompt and output, length of the prompt)."""
        self.num_turns -= 1
        self._tokens = self._tokens + self._draw.tokens(self._wanted.own_tokens)
        input_length = len(self._tokens)
        self._tokens = self._tokens + self._draw.tokens(self._wanted.output_tokens)
        return self._tokens, input_length


def _arrivals(wanted: Workload) -> Iterator[tuple[float, array[int], int]]:
    """(seconds, tokens of prompt and output, length of the prompt) in order of time, without end."""
    draw = _Draw(wanted.seed)
    parts = _Parts(draw, wanted)
    sessions_a_second = wanted.rate / wanted.turns
    numbers = count()
    waiting: list[tuple[float, int, _Session]] = []
    opens_s = draw.pause(1 / sessions_a_second)
    while True:
        while not waiting or opens_s <= waiting[0][0]:
            heappush(waiting, (opens_s, next(numbers), _Session(wanted, draw, parts.pick())))
            opens_s += draw.pause(1 / sessions_a_second)
        time_s, _, session = heappop(waiting)
        yield time_s, *session.next_turn()
        if session.num_turns:
            heappush(waiting, (time_s + draw.pause(wanted.pause_s), next(numbers), session))


class _Parts:
    """The shared prefixes or documents; the first ones come most often."""

    def __init__(self, draw: _Draw, wanted: Workload) -> None:
        self._draw = draw
        self._parts = [draw.tokens(wanted.shared_tokens) for _ in range(wanted.groups)]
        self._num_picked = min(wanted.num_parts, wanted.groups)
        self._weights = list(accumulate((place + 1) ** -_ZIPF_EXPONENT for place in range(wanted.groups)))

    def pick(self) -> array[int]:
        """Different ones, one behind the other."""
        picked: dict[int, None] = {}
        while len(picked) < self._num_picked:
            picked[self._draw.pick(self._weights)] = None
        return array("I", b"".join(self._parts[place].tobytes() for place in picked))


class _Draw:
    """Every random choice. Only `random` and `getrandbits` of Python's generator: no version changes what they give."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pause(self, mean: float) -> float:
        """Exponential, of this mean."""
        return -mean * math.log(1.0 - self._random.random())

    def turns(self, mean: int) -> int:
        """Geometric, of this mean; at most eight times as many."""
        if mean == 1:
            return 1
        drawn = 1 + int(math.log(1.0 - self._random.random()) / math.log(1.0 - 1.0 / mean))
        return min(drawn, 8 * mean)

    def length(self, mean: int) -> int:
        """Log-normal, of this mean; at least 1 and at most eight times as many."""
        angle, radius = 2 * math.pi * self._random.random(), -2 * math.log(1.0 - self._random.random())
        normal = math.sqrt(radius) * math.cos(angle)
        return max(1, min(round(mean * math.exp(_SPREAD * normal - _SPREAD**2 / 2)), 8 * mean))

    def tokens(self, mean: int) -> array[int]:
        """Random ids, so many as `length` says."""
        length = self.length(mean)
        return array("I", self._random.getrandbits(32 * length).to_bytes(4 * length, "little"))

    def pick(self, cumulative: list[float]) -> int:
        """An index, by the running sums of the weights."""
        return min(bisect_right(cumulative, self._random.random() * cumulative[-1]), len(cumulative) - 1)
