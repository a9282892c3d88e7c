"""A target that needs no model: its times follow from what it is told, and its cache is a set of beginnings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anaphora.bench.measurement import BenchRequest, Sample
from anaphora.errors import BenchError

BLOCK = 16


class FakeTarget:
    """1 ms for each computed prompt token, 10 ms for each output token after the first; waves take their longest.

    knows: whether replies say what was cached. slow: times are multiplied by it. dies_after: waves until it is gone.
    """

    has_salt = True

    def __init__(
        self,
        name: str = "fake",
        *,
        caching: bool | None = True,
        knows: bool = True,
        slow: float = 1.0,
        dies_after: int | None = None,
        refuses: Callable[[BenchRequest], str | None] = lambda request: None,
        fixed_pool: int | None = None,
    ) -> None:
        self.name = name
        self.caching = caching
        self.pool_tokens: int | None = fixed_pool
        self._fixed = fixed_pool is not None
        self._knows, self._slow, self._left, self._refuses = knows, slow, dies_after, refuses
        self._cached: dict[tuple[str | None, tuple[int, ...]], None] = {}
        self.begun: list[int] = []
        self.sent: list[list[BenchRequest]] = []
        self._counters = {"queried_tokens": 0, "hit_tokens": 0}

    def begin(self, pool_tokens: int) -> None:
        self.begun.append(pool_tokens)
        self.pool_tokens = self.pool_tokens if self._fixed else pool_tokens
        self.reset()

    def reset(self) -> bool:
        self._cached.clear()
        return True

    def run(self, requests: Sequence[BenchRequest]) -> tuple[float, list[Sample]]:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise BenchError("gone")
        self.sent.append(list(requests))
        samples = [self._one(request) for request in requests]
        return max(sample.e2e_s for sample in samples), samples

    def _one(self, request: BenchRequest) -> Sample:
        refusal = self._refuses(request)
        if refusal is not None:
            return Sample(len(request.token_ids), None, 0, 0.0, 0.0, error=refusal)
        ids, salt, cached = request.token_ids, request.cache_salt, 0
        for end in range(BLOCK, len(ids), BLOCK):
            if (salt, ids[:end]) not in self._cached:
                break
            cached = end
        if self.caching is not False:
            for end in range(BLOCK, len(ids) + 1, BLOCK):
                self._cached.pop((salt, ids[:end]), None)
                self._cached[salt, ids[:end]] = None
            while len(self._cached) * BLOCK > (self.pool_tokens or 0):
                del self._cached[next(iter(self._cached))]
        self._counters["queried_tokens"] += len(ids)
        self._counters["hit_tokens"] += cached
        ttft_s = (len(ids) - cached) * 1e-3 * self._slow
        gaps_s = (0.01 * self._slow,) * (request.output_tokens - 1)
        shown = cached if self._knows else None
        return Sample(len(ids), shown, request.output_tokens, ttft_s, ttft_s + sum(gaps_s), gaps_s)

    def counters(self) -> dict[str, int] | None:
        return dict(self._counters)

    def describe(self) -> dict[str, Any]:
        return {"kind": "fake", "model": "none"}

    def close(self) -> None:
        pass
