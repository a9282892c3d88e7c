"""Every combination of pool size, block size and policy on one trace, as plain rows. Same input, same rows.

Knows the two ways to replay and what they report; must not know how rows are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from anaphora.core.eviction import PolicyFactory, policy_factory
from anaphora.errors import ConfigError
from anaphora.sim.offline import OFFLINE_OPTIMUM, offline_optimum
from anaphora.sim.sequential import replay_sequential, unbounded_blocks
from anaphora.sim.timed import TimedOptions, TimedResult, replay_timed
from anaphora.sim.trace import Trace

MODES = ("sequential", "timed")
_DEFAULT_SHARES = (64, 32, 16, 8, 4, 2, 1)
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to run. blocks: pool sizes, empty for seven that lead up to the trace's working set.

    with_outputs: whether a sequential replay computes outputs too; None does if the trace has ids for them.
    Raises ConfigError.
    """

    blocks: Sequence[int] = ()
    block_sizes: Sequence[int] = ()
    policies: Sequence[str] = ("lru",)
    mode: str = "sequential"
    with_outputs: bool | None = None
    timed: TimedOptions = field(default_factory=TimedOptions)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        for blocks in (*self.blocks, *self.block_sizes):
            if blocks < 1:
                raise ConfigError(f"pool sizes and block sizes must be at least 1, got {blocks}")
        for policy in self.policies:
            if policy != OFFLINE_OPTIMUM:
                policy_factory(policy)
            elif self.mode == "timed":
                raise ConfigError(f"{OFFLINE_OPTIMUM} knows the order of requests only in sequential mode")

    def counts_outputs(self, trace: Trace) -> bool:
        """Timed replays generate always."""
        return self.mode == "timed" or (trace.has_output_ids if self.with_outputs is None else self.with_outputs)

    def block_sizes_of(self, trace: Trace) -> Sequence[int]:
        return self.block_sizes or (trace.block_size,)

    def blocks_of(self, trace: Trace, block_size: int) -> Sequence[int]:
        """The pool sizes asked for, or halving from the working set down to what the largest request needs.

        That need itself is left out where the next size is less than half as much again: two points in one place.
        """
        if self.blocks:
            return self.blocks
        low = trace.max_request_blocks(block_size)
        high = max(1, trace.num_distinct_blocks(block_size, with_outputs=self.counts_outputs(trace)))
        sizes = sorted({max(low, high // share, 1) for share in _DEFAULT_SHARES})
        return sizes[1:] if len(sizes) > 1 and 2 * sizes[1] < 3 * sizes[0] else sizes

    def num_replays(self, trace: Trace) -> int:
        """Replays of the whole trace that `run_sweep` makes."""
        sizes = self.block_sizes_of(trace)
        return sum(1 + len(self.policies) * len(self.blocks_of(trace, size)) for size in sizes)


def run_sweep(trace: Trace, sweep: Sweep, progress: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Plain data: about the trace, and for each block size a bound and one row a point. Raises ConfigError."""
    sizes = []
    with_outputs = sweep.counts_outputs(trace)
    for block_size in sweep.block_sizes_of(trace):
        trace.check_block_size(block_size)
        most = unbounded_blocks(trace, block_size, with_outputs=with_outputs)
        bound = replay_sequential(trace, most, block_size, with_outputs=with_outputs, progress=progress)
        rows = [
            _point(trace, sweep, policy, num_blocks, block_size, progress)
            for policy in sweep.policies
            for num_blocks in sweep.blocks_of(trace, block_size)
        ]
        sizes.append(
            {
                "block_size": block_size,
                "exact": block_size % trace.block_size == 0,
                "num_distinct_blocks": trace.num_distinct_blocks(block_size, with_outputs=with_outputs),
                "unbounded_hit_rate": bound.hit_rate,
                "points": rows,
            }
        )
    return {
        "trace": trace.name,
        "num_requests": len(trace.requests),
        "num_skipped_lines": trace.num_skipped,
        "num_input_tokens": trace.num_input_tokens,
        "recorded_hit_rate": trace.recorded_hit_rate,
        "mode": sweep.mode,
        "with_outputs": with_outputs,
        "cost_model": asdict(sweep.timed.cost_model) if sweep.mode == "timed" else None,
        "block_sizes": sizes,
    }


def _point(
    trace: Trace, sweep: Sweep, policy: str, num_blocks: int, block_size: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy, "num_blocks": num_blocks}
    made: str | PolicyFactory = policy
    with_outputs = sweep.counts_outputs(trace)
    if policy == OFFLINE_OPTIMUM:
        made = offline_optimum(trace, num_blocks, block_size, with_outputs=with_outputs)
    if sweep.mode == "timed":
        return row | _timed_row(replay_timed(trace, num_blocks, block_size, made, sweep.timed, progress=progress))
    result = replay_sequential(trace, num_blocks, block_size, made, with_outputs=with_outputs, progress=progress)
    return row | {
        "hit_rate": result.hit_rate,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_saved_tokens": result.num_hit_tokens,
        "num_computed_tokens": result.num_computed_tokens,
        "num_evicted_blocks": result.num_evicted_blocks,
        "num_refused_requests": result.num_refused,
        "num_cut_requests": result.num_cut,
    }


def _timed_row(result: TimedResult) -> dict[str, Any]:
    counters = result.counters
    times = [times for times in result.times if times.finished_s > 0]
    return {
        "hit_rate": counters.hit_rate,
        "num_prompt_tokens": counters.num_queried_tokens,
        "num_saved_tokens": counters.num_hit_tokens,
        "num_computed_tokens": counters.num_computed_tokens,
        "num_evicted_blocks": counters.num_evicted_blocks,
        "num_refused_requests": result.num_refused,
        "num_cut_requests": result.num_cut,
        "num_preemptions": counters.num_preemptions,
        "num_steps": counters.num_steps,
        "duration_s": result.duration_s,
        "ttft_s": _summary([entry.ttft_s for entry in times]),
        "queue_s": _summary([entry.queue_s for entry in times]),
        "wait_s": _summary([entry.wait_s for entry in times]),
        "compute_s": _summary([entry.compute_s for entry in times]),
    }


def _summary(values: list[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank); empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{share}": ordered[-(-len(ordered) * share // 100) - 1] for share in _PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks}
