"""An engine in this process as a target: a fresh one each time `begin` is called, over a model that is loaded once.

Knows `anaphora.api` and the step engine. The clock is the one of the HTTP side: the client's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from anaphora.api.build import connect
from anaphora.bench.measurement import BenchRequest, Sample
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.engine.outputs import RequestOutput
from anaphora.errors import AnaphoraError, BenchError, RequestError
from anaphora.runtime.model import LoadedModel
from anaphora.sampling_params import SamplingParams

_COUNTERS = (
    ("queried_tokens", "num_queried_tokens"),
    ("hit_tokens", "num_hit_tokens"),
    ("computed_prompt_tokens", "num_computed_prompt_tokens"),
    ("generated_tokens", "num_generated_tokens"),
    ("evicted_blocks", "num_evicted_blocks"),
    ("preemptions", "num_preemptions"),
)


class EngineTarget:
    """Name, and the options of its engines; their pool is the bench's to choose."""

    has_salt = True

    def __init__(self, name: str, config: EngineConfig, loaded: LoadedModel) -> None:
        self.name = name
        self.caching: bool | None = config.enable_prefix_caching
        self._config = config
        self._loaded = loaded
        self._engine: Engine | None = None
        self._num_requests = 0

    @property
    def pool_tokens(self) -> int | None:
        return None if self._engine is None else self._engine.num_blocks * self._engine.block_size

    def begin(self, pool_tokens: int) -> None:
        """Raises ConfigError, UnsupportedModelError."""
        self.close()  # two pools at once may not fit
        num_blocks = -(-pool_tokens // self._config.block_size)
        config = dataclasses.replace(self._config, num_blocks=num_blocks, kv_cache_bytes=None)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._engine = connect(config, self._loaded)
        _touch_pool(self._engine)

    def reset(self) -> bool:
        return self._running.reset_prefix_cache()

    def run(self, requests: Sequence[BenchRequest]) -> tuple[float, list[Sample]]:
        """A refused request is a sample with an error."""
        engine, clock = self._running, time.perf_counter
        names = [f"bench-{self._num_requests + index}" for index in range(len(requests))]
        self._num_requests += len(requests)
        tokens_s: dict[str, list[float]] = {name: [] for name in names}
        ends_s: dict[str, float] = {}
        outputs: dict[str, RequestOutput] = {}
        refused: dict[str, RequestError] = {}
        begin_s = clock()
        for name, request in zip(names, requests, strict=True):
            params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
            try:
                engine.add_request(name, request.token_ids, params, cache_salt=request.cache_salt)
            except RequestError as error:
                refused[name] = error
        while engine.has_unfinished:
            for step in engine.step():
                now_s = clock() - begin_s
                tokens_s[step.request_id] += [now_s] * len(step.token_ids)
                if step.output is not None:
                    ends_s[step.request_id] = now_s
                    outputs[step.request_id] = step.output
        duration_s = clock() - begin_s
        return duration_s, [
            _failed(refused[name], request) if name in refused else _sample(outputs[name], tokens_s[name], ends_s[name])
            for name, request in zip(names, requests, strict=True)
        ]

    def counters(self) -> dict[str, int] | None:
        counters = self._running.stats().counters
        return {name: getattr(counters, field) for name, field in _COUNTERS}

    def describe(self) -> dict[str, Any]:
        config = {
            field.name: getattr(self._config, field.name)
            for field in dataclasses.fields(EngineConfig)
            if field.name not in ("model", "tokenizer", "num_blocks", "kv_cache_bytes", "cache_dir")
        }
        identity: Mapping[str, str] = self._loaded.identity
        return {
            "kind": "engine",
            "model": self._loaded.name,
            "identity": dict(identity),
            "options": config,
        }

    def close(self) -> None:
        self._engine = None

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise BenchError(f"target {self.name} has no engine: call begin first")
        return self._engine


def _touch_pool(engine: Engine) -> None:
    """A pool takes memory page by page as it fills. Take it now: the first use of a page costs extra, cached or not."""
    pool = engine._executor.cache  # type: ignore[attr-defined]  # the executor behind the protocol is torch's
    for tensor in (*pool.keys, *pool.values):
        tensor.zero_()


def _failed(error: AnaphoraError, request: BenchRequest) -> Sample:
    return Sample(len(request.token_ids), None, 0, 0.0, 0.0, error=str(error))


def _sample(output: RequestOutput, tokens_s: list[float], end_s: float) -> Sample:
    error = output.error if output.error is not None else None if tokens_s else "the request ended without a token"
    return Sample(
        len(output.prompt_token_ids),
        output.num_cached_tokens,
        len(output.outputs[0].token_ids),
        tokens_s[0] if tokens_s else 0.0,
        end_s,
        tuple(later - earlier for earlier, later in pairwise(tokens_s)),
        _parts(output),
        error=error,
    )


def _parts(output: RequestOutput) -> dict[str, float]:
    parts = output.metrics.ttft_parts
    return (
        {} if parts is None else {name.removesuffix("_s"): value for name, value in dataclasses.asdict(parts).items()}
    )
