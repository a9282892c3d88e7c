"""Counters only rise, snapshots do not change, and gauges keep live, cached and blank blocks apart."""

from __future__ import annotations

from dataclasses import asdict

from core_world import World

from anaphora.core import Counters


def test_counters_of_a_miss_a_hit_and_an_eviction() -> None:
    world = World(6)
    world.add("a", range(10), max_tokens=2)
    world.run()
    world.add("b", [*range(8), 50], max_tokens=1)
    world.run()
    world.add("c", range(100, 120), max_tokens=1)
    world.run()
    counters = world.scheduler.stats().counters
    assert asdict(counters) == asdict(
        Counters(
            num_queried_tokens=10 + 9 + 20,
            num_hit_tokens=8,
            num_computed_tokens=11 + 1 + 20,
            num_computed_prompt_tokens=10 + 1 + 20,
            num_generated_tokens=4,
            num_committed_blocks=2 + 0 + 5,
            num_evicted_blocks=1,
            num_steps=4,
            num_finished_requests=3,
        )
    )
    assert counters.hit_rate == 8 / 39


def test_a_delta_describes_an_interval_and_a_snapshot_stays_as_it_was() -> None:
    world = World(6)
    world.add("a", range(9))
    world.run()
    earlier = world.scheduler.stats().counters
    copy = asdict(earlier)
    world.add("b", range(9))
    world.run()
    assert asdict(earlier) == copy
    delta = world.scheduler.stats().counters.delta(earlier)
    assert asdict(delta) == asdict(
        Counters(
            num_queried_tokens=9,
            num_hit_tokens=8,
            num_computed_tokens=1,
            num_computed_prompt_tokens=1,
            num_generated_tokens=1,
            num_steps=1,
            num_finished_requests=1,
        )
    )
    assert delta.hit_rate == 8 / 9


def test_the_hit_rate_before_the_first_query_is_zero() -> None:
    assert Counters().hit_rate == 0.0


def test_gauges_keep_live_cached_and_blank_blocks_apart() -> None:
    world = World(8, max_num_seqs=1)
    world.add("a", range(9), max_tokens=2)
    world.add("b", [1], max_tokens=1)
    world.step()
    gauges = world.scheduler.stats().gauges
    assert (gauges.num_total_blocks, gauges.num_live_blocks, gauges.num_cached_blocks, gauges.num_blank_blocks) == (
        8,
        3,
        0,
        5,
    )
    assert (gauges.num_running, gauges.num_waiting, gauges.num_following) == (1, 1, 0)
    world.run()
    gauges = world.scheduler.stats().gauges
    assert (gauges.num_live_blocks, gauges.num_cached_blocks, gauges.num_blank_blocks) == (0, 2, 6)
    assert (gauges.num_running, gauges.num_waiting) == (0, 0)


def test_ends_are_counted_by_their_kind() -> None:
    world = World(20)
    for name in ("done", "stopped", "aborted", "failed"):
        world.add(name, [ord(letter) for letter in name], max_tokens=2)
    world.step(failing={"failed"})
    world.finish("stopped", "stop")
    world.finish("aborted")
    world.run()
    counters = world.scheduler.stats().counters
    assert (counters.num_finished_requests, counters.num_aborted_requests, counters.num_failed_requests) == (2, 1, 1)


def test_what_a_failed_request_computed_in_its_last_step_is_not_counted() -> None:
    world = World(20, budget=8)
    world.add("a", range(20))
    world.step()
    world.step(failing={"a"})
    counters = world.scheduler.stats().counters
    assert (counters.num_computed_tokens, counters.num_failed_steps, counters.num_steps) == (8, 0, 2)
    world.add("b", range(100, 109))
    world.schedule()
    world.fail()
    counters = world.scheduler.stats().counters
    assert (counters.num_computed_tokens, counters.num_failed_steps, counters.num_steps) == (8, 1, 3)
