"""What each group of the cache holds, for Prometheus. Knows prometheus-client and an engine's statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from anaphora.engine.outputs import EngineStats


def group_metrics(stats: EngineStats, bytes_per_token: Sequence[int] | None) -> Iterator[Metric]:
    """A label value for each group, its number first, as several may be of one kind. bytes_per_token: of each."""
    blocks = GaugeMetricFamily(
        "anaphora:kv_group_blocks", "Blocks of each group of layers, as in kv_blocks.", labels=["group", "state"]
    )
    for number, group in enumerate(stats.groups):
        blocks.add_metric([f"{number} {group.kind}", "live"], group.num_live_blocks)
        blocks.add_metric([f"{number} {group.kind}", "cached"], group.num_cached_blocks)
    yield blocks
    if bytes_per_token is not None:
        costs = GaugeMetricFamily(
            "anaphora:kv_bytes_per_token", "What one token takes in each group of layers.", labels=["group"]
        )
        for number, (group, num_bytes) in enumerate(zip(stats.groups, bytes_per_token, strict=True)):
            costs.add_metric([f"{number} {group.kind}"], num_bytes)
        yield costs
    slots = GaugeMetricFamily(
        "anaphora:state_slots",
        "Checkpoints of recurrent state: those held, and the room for others.",
        labels=["state"],
    )
    held = stats.gauges.num_checkpoints
    slots.add_metric(["held"], held)
    slots.add_metric(["free"], stats.gauges.num_state_slots - held)
    yield slots
