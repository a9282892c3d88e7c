"""Counters and gauges of the control plane as plain data. Counters only rise; their difference describes an interval.

hit rate = hit / queried tokens. A request counts once, at its first admission; what it looks up again after a
preemption is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from anaphora.core.what_if import WhatIfPoint


@dataclass(slots=True)
class Counters:
    """Tokens unless the name says otherwise, cumulative since the engine began. `stats()` gives copies.

    queried, hit: prompt tokens of first admissions, and how many of them were found.
    bypassed: prompt tokens of first admissions that look nothing up, as they want more of every position than
        K/V (prompt_logprobs, an embedding pooled over all): not among the queried ones, and all of them computed.
    computed: tokens whose K/V were computed; prompt ones among them (each position once: queried - hit + bypassed when
        all have ended, or less where a preempted request finds prompt tokens that it never computed); recomputed ones
        among them (computed before, lost by a preemption).
    requeried, rehit: as queried and hit, of admissions after a preemption.
    evicted_blocks: lost their content to an allocation. committed_blocks: became findable. duplicate_blocks: of these,
        beside a block of the same content. collisions: blocks kept out of the index as their hash names other content.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_bypassed_tokens: int = 0
    num_computed_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_generated_tokens: int = 0
    num_requeried_tokens: int = 0
    num_rehit_tokens: int = 0
    num_preemptions: int = 0
    num_committed_blocks: int = 0
    num_duplicate_blocks: int = 0
    num_evicted_blocks: int = 0
    num_collisions: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    num_finished_requests: int = 0
    num_aborted_requests: int = 0
    num_failed_requests: int = 0

    def delta(self, earlier: Counters) -> Counters:
        """What happened since an earlier snapshot of the same engine."""
        return Counters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests admitted, each once: queried or bypassed."""
        return self.num_queried_tokens + self.num_bypassed_tokens

    @property
    def hit_rate(self) -> float:
        """In [0, 1]; 0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state now. live + cached + blank == total blocks (the null block is not among them).

    live: held by requests. cached: free and findable. blank: free, nothing findable in them. pinned: contents that a
    request asked to keep longer, live or cached. checkpoints: of recurrent state, held in as many state slots at most.
    """

    num_total_blocks: int
    num_live_blocks: int
    num_cached_blocks: int
    num_blank_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    num_following: int = 0
    num_pinned_blocks: int = 0
    num_checkpoints: int = 0
    num_state_slots: int = 0


@dataclass(frozen=True, slots=True)
class GroupGauges:
    """What one group of the cache's layout holds now. live, cached: as in Gauges."""

    kind: str
    num_live_blocks: int
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class Stats:
    """groups: one for each group of the cache's layout. what_if: the hit rate of LRU with other pools, smallest first;
    empty where no curve is kept.
    """

    counters: Counters
    gauges: Gauges
    groups: tuple[GroupGauges, ...] = ()
    what_if: tuple[WhatIfPoint, ...] = ()
