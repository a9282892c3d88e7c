"""What crosses between a target and the rest: requests down, waves of samples up. Plain data, and JSON both ways.

Knows no engine, no HTTP and no statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

COUNTERS = (
    "queried_tokens",
    "hit_tokens",
    "prompt_tokens",
    "computed_prompt_tokens",
    "generated_tokens",
    "evicted_blocks",
    "preemptions",
)
"""What targets count, in one spelling; a target gives those that it has."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Greedy, and past the model's own end tokens where the target can."""

    token_ids: tuple[int, ...]
    output_tokens: int
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Seconds from the moment at which the whole wave was sent.

    prompt_tokens, output_tokens: as the target reports them, else what was asked for and what was seen
        (`is_reported` says which). cached_tokens: None if the target does not say.
    ttft_s: to the first piece of output. gaps_s: between pieces; one a token if there are output_tokens - 1 of them.
    parts_s: the target's own account of the time to the first token, if it gives one.
    error: why there is no answer; then the times mean nothing.
    """

    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    ttft_s: float
    e2e_s: float
    gaps_s: tuple[float, ...] = ()
    parts_s: Mapping[str, float] = field(default_factory=dict)
    is_reported: bool = True
    error: str | None = None

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between two tokens; None with fewer than two."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def token_gaps_s(self) -> tuple[float, ...]:
        """Seconds between tokens: as seen if every piece was one token, else their mean, once a token."""
        if self.itl_s is None:
            return ()
        exact = len(self.gaps_s) == self.output_tokens - 1
        return self.gaps_s if exact else (self.itl_s,) * (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that were sent at once, until the last of them ended.

    counters: how the target's own counters moved meanwhile, by the names in COUNTERS; None if it has none.
    """

    phase: str
    duration_s: float
    samples: tuple[Sample, ...]
    counters: Mapping[str, int] | None = None

    @property
    def completed(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is None]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(sample.output_tokens for sample in self.completed) / self.duration_s if self.duration_s else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Wave:
        samples = tuple(Sample(**{**sample, "gaps_s": tuple(sample["gaps_s"])}) for sample in document["samples"])
        return cls(document["phase"], document["duration_s"], samples, document["counters"])


class Target(Protocol):
    """Something that answers requests. One thread; one call at a time.

    name: its label in every table. caching: whether it caches beginnings; None is as its operator started it.
    pool_tokens: the size of its cache; None if unknown. has_salt: whether `cache_salt` reaches it.
    """

    @property
    def name(self) -> str: ...
    @property
    def caching(self) -> bool | None: ...
    @property
    def pool_tokens(self) -> int | None: ...
    @property
    def has_salt(self) -> bool: ...

    def begin(self, pool_tokens: int) -> None:
        """Be ready, with an empty cache of this size where the target can choose. Raises AnaphoraError."""
        ...

    def reset(self) -> bool:
        """Forget everything cached; False if the target cannot."""
        ...

    def run(self, requests: Sequence[BenchRequest]) -> tuple[float, list[Sample]]:
        """Send all at once: seconds until the last one ended, and a sample each, in order.

        A request that fails is a sample with an error. Raises BenchError if the target is gone.
        """
        ...

    def counters(self) -> dict[str, int] | None:
        """Cumulative, by the names in COUNTERS; None if the target has none."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it is, for the record: kind, model, versions, options. No secrets."""
        ...

    def close(self) -> None: ...
