"""Known, written, committed: what is pending is shared within its step only, and a failed step takes it back."""

from __future__ import annotations

from core_plans import summary, tables
from core_world import World


def world_with_sharers(num_blocks: int = 20) -> World:
    """`w` writes a beginning of three blocks; `r1` and `r2` share it; `other` has nothing to do with them."""
    world = World(num_blocks)
    world.add("w", range(12), max_tokens=3)
    world.add("r1", [*range(12), 50, 51], max_tokens=3)
    world.add("other", range(200, 206), max_tokens=3)
    world.add("r2", [*range(12), 50, 51, 52, 53, 54], max_tokens=3)
    return world


def test_requests_planned_together_share_the_blocks_that_the_step_writes() -> None:
    world = world_with_sharers()
    plan = world.step()
    assert summary(plan) == [("w", 0, 12), ("r1", 12, 2), ("other", 0, 6), ("r2", 12, 5)]
    assert tables(plan) == {"w": (1, 2, 3), "r1": (1, 2, 3, 4), "other": (5, 6), "r2": (1, 2, 3, 7, 8)}
    assert [world.requests[name].num_cached_tokens for name in ("w", "r1", "other", "r2")] == [0, 12, 0, 12]


def test_eight_requests_with_one_beginning_compute_it_once() -> None:
    world = World(40)
    for name in range(8):
        world.add(f"r{name}", [*range(16), 100 + name, 200 + name])
    world.run()
    assert world.scheduler.stats().counters.num_computed_prompt_tokens == 16 + 8 * 2


def test_a_block_that_the_step_fills_only_in_part_is_not_shared() -> None:
    world = World(20)
    world.add("w", range(11))
    world.add("r", range(11))
    assert summary(world.step()) == [("w", 0, 11), ("r", 8, 3)]


def test_pending_blocks_are_not_findable_after_a_step_that_raised() -> None:
    world = world_with_sharers()
    world.schedule()
    updates = world.fail()
    assert [(update.request.request_id, update.error) for update in updates] == [
        (name, "the device is gone") for name in ("w", "r1", "other", "r2")
    ]
    assert world.look_up([*range(12), 50]) == 0
    gauges = world.scheduler.stats().gauges
    assert (gauges.num_live_blocks, gauges.num_cached_blocks, gauges.num_blank_blocks) == (0, 0, 20)
    world.add("next", [*range(12), 50])
    assert summary(world.step()) == [("next", 0, 13)]


def test_a_failed_writer_takes_its_readers_along_and_nobody_else() -> None:
    world = world_with_sharers()
    world.schedule()
    updates = {update.request.request_id: update for update in world.update(failing={"w"})}
    assert updates["w"].error == "not finite"
    assert updates["r1"].error == updates["r2"].error == "it shares blocks of this step with w: not finite"
    assert (updates["other"].error, updates["other"].token.token_id) == (None, 10_006)
    assert world.look_up([*range(12), 50]) == 0
    assert world.look_up(range(200, 206)) == 1
    world.run()
    assert world.requests["other"].finish_reason == "length"


def test_a_failed_reader_takes_neither_its_writer_nor_another_reader_along() -> None:
    world = world_with_sharers()
    world.schedule()
    world.update(failing={"r1"})
    assert {name: request.finish_reason for name, request in world.requests.items()} == {
        "w": None,
        "r1": "error",
        "other": None,
        "r2": None,
    }
    assert world.look_up([*range(12), 50]) == 3
    world.run()


def test_failure_is_carried_along_a_line_of_readers() -> None:
    world = World(20)
    world.add("a", range(4))
    world.add("b", range(8))  # reads block 0 of a, writes block 1
    world.add("c", range(12))  # reads both, writes block 2
    world.add("d", range(16))
    plan = world.schedule()
    assert summary(plan) == [("a", 0, 4), ("b", 4, 4), ("c", 8, 4), ("d", 12, 4)]
    world.update(failing={"b"})
    assert [request.finish_reason for request in world.requests.values()] == ["length", "error", "error", "error"]
    assert world.look_up(range(16)) == 1


def test_what_was_committed_before_a_failed_step_stays() -> None:
    world = World(20, budget=8)
    world.add("a", range(16))
    world.step()
    world.step(failing={"a"})
    assert world.requests["a"].finish_reason == "error"
    assert world.look_up([*range(16), 1]) == 2


def test_a_failed_step_that_evicted_leaves_no_stale_entry() -> None:
    world = World(4)
    world.add("a", range(16))
    world.run()
    assert world.look_up([*range(16), 1]) == 4
    world.add("b", range(100, 108))
    world.schedule()
    world.fail()
    assert world.look_up([*range(16), 1]) == 2
    assert world.look_up([*range(100, 108), 1]) == 0


def test_a_request_ended_in_flight_still_commits_what_its_readers_need() -> None:
    world = world_with_sharers()
    world.schedule()
    world.finish("w")
    world.update()
    assert world.requests["w"].finish_reason == "abort"
    assert [world.requests[name].finish_reason for name in ("r1", "r2")] == [None, None]
    world.run()


def test_a_request_that_fails_after_it_was_ended_in_flight_ends_with_the_error() -> None:
    world = world_with_sharers()
    world.schedule()
    world.finish("w")
    world.update(failing={"w"})
    assert world.requests["w"].finish_reason == "error"
    world.add("w", range(12))  # nothing of the old one is left: the new one is not ended with it
    world.run()
    assert world.requests["w"].finish_reason == "length"


def test_a_request_that_ends_in_the_step_that_it_shares_leaves_its_blocks_to_the_readers() -> None:
    world = World(20)
    world.add("w", range(8), max_tokens=1)
    world.add("r", range(12), max_tokens=5)
    world.step()
    assert world.requests["w"].is_finished
    assert world.cache.pool.ref_counts[1:4] == [1, 1, 1]
    world.run()


def test_without_prefix_caching_nothing_is_shared() -> None:
    world = World(20, caching=False)
    world.add("a", range(8))
    world.add("b", range(8))
    plan = world.step()
    assert (summary(plan), tables(plan)) == ([("a", 0, 8), ("b", 0, 8)], {"a": (1, 2), "b": (3, 4)})


def test_salts_are_not_shared_within_a_step() -> None:
    world = World(20)
    world.add("a", range(8), salt="x")
    world.add("b", range(8), salt="y")
    world.add("c", range(8), salt="x")
    world.add("d", range(8))
    assert summary(world.step()) == [("a", 0, 8), ("b", 0, 8), ("c", 4, 4), ("d", 0, 8)]


def test_two_requests_that_compute_a_block_again_while_its_first_copy_is_evicted_leave_one_beginning() -> None:
    world = World(5, 1)
    world.add("a", [1, 2, 3])
    world.add("b", [1, 2])
    world.step()
    world.add("c", [1], max_tokens=2)
    world.step()
    world.add("d", [1, 2], max_tokens=2)  # takes the block of [1, 2, 3]
    world.add("e", [1, 2], max_tokens=2)  # takes the block of [1, 2]
    assert summary(world.step()) == [("c", 1, 1), ("d", 1, 1), ("e", 1, 1)]
    world.step()
    assert world.look_up([1, 2, *world.requests["d"].output_token_ids]) == 3
    assert world.scheduler.stats().counters.num_collisions == 0
