"""Sequential replay is the real core: it equals an independent brute-force LRU, hit token for hit token."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim.brute_force_lru import brute_force_hits
from sim.trace_builder import random_lines

from anaphora.errors import ConfigError
from anaphora.sim import Trace, TraceRequest, replay_sequential
from anaphora.sim.mooncake import parse_mooncake, read_mooncake
from anaphora.sim.sequential import unbounded_blocks

EXCERPT = Path(__file__).parent / "traces" / "conversation_head.jsonl"


def assert_equals_brute_force(trace: Trace, num_blocks: int, block_size: int = 512) -> None:
    hits: list[int] = []
    result = replay_sequential(trace, num_blocks, block_size, hits=hits)
    requests = [(request.input_length, trace.block_ids(request, block_size)) for request in trace.requests]
    assert hits == brute_force_hits(requests, num_blocks, block_size)
    assert result.num_hit_tokens == sum(hit for hit in hits if hit > 0)
    assert result.num_refused == hits.count(-1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_blocks", [1, 3, 8, 13, 20, 40, 100, 1000])
def test_random_traces_equal_brute_force(seed: int, num_blocks: int) -> None:
    assert_equals_brute_force(parse_mooncake(random_lines(seed, 80), "random"), num_blocks)


@pytest.mark.parametrize("block_size", [64, 256, 512, 1024, 2048])
@pytest.mark.parametrize("num_blocks", [40, 300, 2000, 20_000])
def test_excerpt_of_a_real_trace_equals_brute_force_at_every_block_size(block_size: int, num_blocks: int) -> None:
    assert_equals_brute_force(read_mooncake(EXCERPT), num_blocks, block_size)


def one(length: int, *ids: int, output: int = 1) -> TraceRequest:
    return TraceRequest(0.0, length, output, ids)


def test_the_last_token_is_always_computed() -> None:
    hits: list[int] = []
    trace = Trace("t", 512, [one(1024, 1, 2), one(1024, 1, 2), one(1025, 1, 2, 3), one(1, 9)])
    result = replay_sequential(trace, 10, 512, hits=hits)
    assert hits == [0, 512, 1024, 0]
    assert (result.num_prompt_tokens, result.num_computed_tokens) == (3074, 1538)


def test_a_request_larger_than_the_pool_is_refused_and_counts_nowhere_else() -> None:
    hits: list[int] = []
    result = replay_sequential(Trace("t", 512, [one(513, 1, 2), one(512, 1), one(512, 1)]), 1, 512, hits=hits)
    assert hits == [-1, 0, 0]
    assert (result.num_refused, result.num_requests, result.num_prompt_tokens) == (1, 2, 1024)


def test_outputs_take_room_while_they_run() -> None:
    """Two blocks of prompt, and three for 1,025 tokens of which the last is never computed on."""
    first, other = one(1024, 1, 2), one(1024, 3, 4, output=1026)
    again = one(1024, 1, 2)
    trace = Trace("t", 512, [first, other, again])
    assert replay_sequential(trace, 5, 512).num_hit_tokens == 512
    assert replay_sequential(trace, 5, 512, with_outputs=True).num_hit_tokens == 0
    assert replay_sequential(trace, 6, 512, with_outputs=True).num_hit_tokens == 512


def test_larger_blocks_are_exact_and_smaller_ones_never_hit_more_tokens_than_there_are() -> None:
    trace = Trace("t", 512, [one(2000, 1, 2, 3, 4), one(2000, 1, 2, 5, 6)])
    assert [replay_sequential(trace, 100, size).num_hit_tokens for size in (128, 512, 1024, 2048)] == [1024] * 3 + [0]


def test_a_block_size_that_does_not_go_with_the_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple or a divisor of 512"):
        replay_sequential(Trace("t", 512, [one(2000, 1, 2, 3, 4)]), 100, 300)


def test_an_unbounded_pool_never_evicts() -> None:
    trace = read_mooncake(EXCERPT)
    assert replay_sequential(trace, unbounded_blocks(trace, 512), 512).num_evicted_blocks == 0


def test_progress_adds_up() -> None:
    done: list[int] = []
    replay_sequential(parse_mooncake(random_lines(1, 600), "random"), 50, 512, progress=done.append)
    assert sum(done) == 600
