"""What the control plane counts and holds at one moment, collected from where it is known. Changes nothing."""

from __future__ import annotations

from dataclasses import replace

from anaphora.core.cache_manager import CacheManager
from anaphora.core.request_queues import RequestQueues
from anaphora.core.stats import Counters, Gauges, GroupGauges, Stats


def snapshot(counters: Counters, cache: CacheManager, queues: RequestQueues) -> Stats:
    """A copy; two of them give a delta. counters: those of requests and steps; the ones of blocks are asked for."""
    pool, index, checkpoints = cache.pool, cache.spine.index, cache.checkpoints
    gauges = Gauges(
        num_total_blocks=pool.num_blocks,
        num_live_blocks=pool.num_live,
        num_cached_blocks=pool.free_queue.num_cached,
        num_blank_blocks=pool.free_queue.num_blank,
        num_running=len(queues.running),
        num_waiting=queues.num_waiting,
        num_following=queues.num_following,
        num_pinned_blocks=cache.spine.pins.num_pinned,
        num_checkpoints=0 if checkpoints is None else len(checkpoints),
        num_state_slots=0 if checkpoints is None else checkpoints.num_slots,
    )
    all_counters = replace(
        counters,
        num_committed_blocks=index.num_committed,
        num_duplicate_blocks=index.num_duplicates,
        num_collisions=index.num_collisions,
        num_evicted_blocks=pool.num_evicted,
    )
    what_if = () if cache.finder.what_if is None else cache.finder.what_if.curve()
    return Stats(all_counters, gauges, _group_gauges(cache), what_if)


def _group_gauges(cache: CacheManager) -> tuple[GroupGauges, ...]:
    """What each group of the layout holds now."""
    pool, sides, gauges = cache.pool, cache.pool.sides, cache.sides.gauges()
    if cache.spine is pool:
        num_live = pool.num_live - sum(sides.num_live)
        num_cached = pool.free_queue.num_cached - sum(sides.num_cached)
        gauges.insert(0, GroupGauges(str(cache.layout.groups[0]), num_live, num_cached))
    return tuple(gauges)
