"""The what-if curve and pins for Prometheus. Knows prometheus-client and an engine's statistics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from anaphora.engine.outputs import EngineStats


def what_if_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Nothing of the curve where the engine keeps none."""
    yield GaugeMetricFamily(
        "anaphora:kv_pinned_blocks",
        "Contents that requests asked to keep longer, live or cached.",
        value=stats.gauges.num_pinned_blocks,
    )
    if not stats.what_if:
        return
    rates = GaugeMetricFamily(
        "anaphora:what_if_hit_rate",
        "Estimated hit rate since the start, 0 to 1, of an LRU pool of this many times the blocks.",
        labels=["pool"],
    )
    for point in stats.what_if:
        rates.add_metric([f"{point.scale:g}x"], point.hit_rate)
    yield rates
