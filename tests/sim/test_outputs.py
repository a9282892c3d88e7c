"""What is generated is computed and cached as in the engine, and hit where the trace says what it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anaphora.core.eviction import POLICIES
from anaphora.sim import Trace, TraceRequest, replay_sequential
from anaphora.sim.offline import offline_optimum
from anaphora.sim.sequential import unbounded_blocks
from anaphora.sim.sweep import Sweep, run_sweep
from anaphora.sim.workloads import generate_trace, workload

CHAT = workload("chat", requests=60, shared_tokens=60, own_tokens=20, output_tokens=40, seed=1)
TURNS = Trace("t", 8, [TraceRequest(0, 12, 21, (1, 2), (3, 4, 5)), TraceRequest(1, 40, 1, (1, 3, 4, 5, 6))])
"""A prompt of 12 tokens and 20 computed ones of output; a second turn of 40 tokens that begins with all 32."""


def hits_of(trace: Trace, num_blocks: int, block_size: int, *, with_outputs: bool = True) -> list[int]:
    hits: list[int] = []
    replay_sequential(trace, num_blocks, block_size, with_outputs=with_outputs, hits=hits)
    return hits


@pytest.mark.parametrize(("block_size", "second"), [(8, 32), (16, 32), (32, 32), (4, 8)])
def test_the_next_turn_hits_what_was_generated(block_size: int, second: int) -> None:
    """At a divisor the prompt's partial block has another id than the full one, so the turns part at its start."""
    assert hits_of(TURNS, 100, block_size) == [0, second]
    assert hits_of(TURNS, 100, 8, with_outputs=False) == [0, 8]


def test_at_a_divisor_nothing_of_a_known_block_is_lost() -> None:
    """A prompt that ends with a trace block, so that the output's parts follow the very same parent."""
    turns = Trace("t", 8, [TraceRequest(0, 8, 13, (1,), (2,)), TraceRequest(1, 24, 1, (1, 2, 3))])
    assert hits_of(turns, 100, 4) == [0, 16]
    assert hits_of(turns, 100, 4, with_outputs=False) == [0, 8]


@pytest.mark.parametrize("num_blocks", [30, 60, 500])
def test_multiples_of_the_traces_blocks_are_exact_with_outputs_too(num_blocks: int) -> None:
    """Ids of 4 tokens, replayed at 16, give the hits of ids of 16."""
    assert hits_of(generate_trace(CHAT, 4), num_blocks, 16) == hits_of(generate_trace(CHAT, 16), num_blocks, 16)


def test_an_output_that_the_pool_cannot_hold_is_cut() -> None:
    result = replay_sequential(Trace("t", 8, [TraceRequest(0, 12, 100, (1, 2))]), 4, 8, with_outputs=True)
    assert (result.num_refused, result.num_cut, result.num_requests) == (0, 1, 1)


@pytest.mark.parametrize("with_ids", [True, False])
def test_the_bound_never_evicts_and_the_offline_optimum_is_one(with_ids: bool) -> None:
    trace = generate_trace(CHAT, 16)
    if not with_ids:
        trace = replace(trace, requests=[replace(request, output_hash_ids=()) for request in trace.requests])
    most = unbounded_blocks(trace, 16, with_outputs=True)
    unbounded = replay_sequential(trace, most, 16, with_outputs=True)
    assert unbounded.num_evicted_blocks == 0
    (sizes,) = run_sweep(trace, Sweep(blocks=(40,), with_outputs=True))["block_sizes"]
    assert sizes["unbounded_hit_rate"] == unbounded.hit_rate
    policy = offline_optimum(trace, 40, 16, with_outputs=True)
    best = replay_sequential(trace, 40, 16, policy, with_outputs=True).num_hit_tokens
    for name in POLICIES:
        assert replay_sequential(trace, 40, 16, name, with_outputs=True).num_hit_tokens <= best
