"""What Prometheus reads: the engine's own counters and gauges as they are, and histograms of what clients saw.

Names follow vLLM's where the meaning is the same. Knows prometheus-client and an AsyncEngine's statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anaphora.engine.async_engine import AsyncEngine
from anaphora.engine.outputs import RequestOutput
from anaphora.engine.ttft import TtftParts
from anaphora.server.group_metrics import group_metrics
from anaphora.server.what_if_metrics import what_if_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PARTS = tuple(field.name.removesuffix("_s") for field in fields(TtftParts))
_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)

_COUNTERS = (
    (
        "prefix_cache_queries",
        "num_queried_tokens",
        "Prompt tokens looked up, once per request, at its first admission.",
    ),
    ("prefix_cache_hits", "num_hit_tokens", "Prompt tokens found by those look-ups."),
    (
        "prefix_cache_bypassed",
        "num_bypassed_tokens",
        "Prompt tokens of requests that look nothing up: they want more of every position than K/V.",
    ),
    ("prompt_tokens", "num_prompt_tokens", "Prompt tokens of admitted requests, each request once."),
    ("prompt_tokens_computed", "num_computed_prompt_tokens", "Prompt tokens computed, each position once."),
    ("computed_tokens", "num_computed_tokens", "Tokens computed: prompts, outputs, and again after preemptions."),
    ("recomputed_tokens", "num_recomputed_tokens", "Tokens computed again after a preemption."),
    ("generation_tokens", "num_generated_tokens", "Tokens sampled."),
    ("num_preemptions", "num_preemptions", "Requests that gave up their blocks to others."),
    ("evicted_blocks", "num_evicted_blocks", "Cached blocks that lost their content to an allocation."),
    ("committed_blocks", "num_committed_blocks", "Blocks that became findable."),
    ("duplicate_blocks", "num_duplicate_blocks", "Committed blocks beside one of the same content."),
    ("hash_collisions", "num_collisions", "Blocks kept out of the index: their hash names other content."),
    ("engine_steps", "num_steps", "Steps of the engine."),
    ("failed_steps", "num_failed_steps", "Steps in which the model failed."),
)
"""Name -> field of core.stats.Counters -> help."""


class _EngineCollector(Collector):
    """Reads one snapshot per scrape, so that its figures belong together."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for name, field, text in _COUNTERS:
            yield CounterMetricFamily(f"anaphora:{name}", text, value=getattr(stats.counters, field))
        ended = CounterMetricFamily("anaphora:engine_requests", "Requests that left the engine.", labels=["end"])
        for end in ("finished", "aborted", "failed"):
            ended.add_metric([end], getattr(stats.counters, f"num_{end}_requests"))
        yield ended
        gauges = stats.gauges
        blocks = GaugeMetricFamily(
            "anaphora:kv_blocks",
            "Blocks: held by requests (live), reclaimable with content (cached), without content (free).",
            labels=["state"],
        )
        for state, number in (
            ("live", gauges.num_live_blocks),
            ("cached", gauges.num_cached_blocks),
            ("free", gauges.num_blank_blocks),
        ):
            blocks.add_metric([state], number)
        yield blocks
        usage = gauges.num_live_blocks / gauges.num_total_blocks if gauges.num_total_blocks else 0.0
        yield GaugeMetricFamily(
            "anaphora:kv_cache_usage_perc", "Share of blocks held by requests, 0 to 1.", value=usage
        )
        yield GaugeMetricFamily(
            "anaphora:kv_cache_tokens",
            "Tokens of one request that all blocks together can hold.",
            value=self._engine.engine.capacity_tokens,
        )
        if self._engine.engine.weights_bytes is not None:
            yield GaugeMetricFamily(
                "anaphora:weights_bytes", "Memory of the model's weights.", value=self._engine.engine.weights_bytes
            )
        for state, number, text in (
            ("running", gauges.num_running, "Requests that hold blocks."),
            ("waiting", gauges.num_waiting + gauges.num_following, "Requests that wait to be admitted."),
            ("following", gauges.num_following, "Among those that wait: for a beginning that another computes."),
        ):
            yield GaugeMetricFamily(f"anaphora:num_requests_{state}", text, value=number)
        yield from group_metrics(stats, self._engine.engine.kv_bytes_per_token)
        yield from what_if_metrics(stats)


class Metrics:
    """The metrics of one server; no state beyond this object."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens of one request.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._parts = Histogram(
            "anaphora:time_to_first_token_part_seconds",
            "What the time to first token was spent on; the parts of a request add up to it.",
            ["part"],
            buckets=(0.0001, 0.0002, 0.0005, *_LATENCY),
            registry=self._registry,
        )
        for part in _PARTS:
            self._parts.labels(part)
        self._outcomes = Counter(
            "anaphora:http_requests",
            "HTTP requests to generating endpoints by how they ended.",
            ["endpoint", "outcome"],
            registry=self._registry,
        )

    def first_token(self, parts: TtftParts) -> None:
        self._ttft.observe(parts.total_s)
        for name, seconds in asdict(parts).items():
            self._parts.labels(name.removesuffix("_s")).observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def finished(self, endpoint: str, outcome: str, outputs: Sequence[RequestOutput]) -> None:
        """One HTTP request has ended; outputs: of those of its requests that finished."""
        self._outcomes.labels(endpoint, outcome).inc()
        for output in outputs:
            self._e2e.observe(output.metrics.e2e_s)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"anaphora:{name}", text, buckets=_LATENCY, registry=self._registry)
