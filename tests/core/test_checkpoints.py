"""Recurrent state: when it is kept, where, for how long, and what a hit loses by it."""

from __future__ import annotations

import pytest
from core_plans import summary
from core_world import World, make_request

from anaphora.core import CacheLayout, CacheManager, FullAttention, StepPlan
from anaphora.core.checkpoints import Checkpoints
from anaphora.core.ids import Lineage, RequestId
from anaphora.errors import ConfigError

HYBRID = CacheLayout((FullAttention(),), has_state=True)
RECURRENT = CacheLayout((), has_state=True)


def hybrid(num_slots: int = 8, interval: int = 8, layout: CacheLayout = HYBRID, **options: int) -> World:
    return World(60, 4, layout=layout, num_state_slots=num_slots, state_checkpoint_interval=interval, **options)


def saves(plan: StepPlan) -> list[tuple[str, int, int, int | None, int | None]]:
    """(request, start, scheduled tokens, slot loaded from, slot saved to)."""
    return [
        (entry.request_id, entry.start, len(entry.token_ids), entry.load_state, entry.save_state)
        for entry in plan.scheduled
    ]


# -- where steps end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [HYBRID, RECURRENT])
def test_steps_end_at_each_interval_and_at_the_last_boundary_before_the_prompts_end(layout: CacheLayout) -> None:
    world = hybrid(layout=layout)
    world.add("a", range(21))
    assert [saves(plan) for plan in world.run()] == [
        [("a", 0, 8, None, 0)],
        [("a", 8, 8, None, 1)],
        [("a", 16, 4, None, 2)],
        [("a", 20, 1, None, None)],
    ]
    assert world.scheduler.stats().gauges.num_checkpoints == 3


def test_the_same_prompt_again_loses_less_than_a_block() -> None:
    for length in (4, 5, 8, 9, 21):
        world = hybrid()
        world.add("a", range(length))
        world.run()
        b = world.add("b", range(length))
        world.run()
        assert b.num_cached_tokens == (length - 1) // 4 * 4


def test_a_shared_beginning_loses_less_than_an_interval_once_and_nothing_from_then_on() -> None:
    world = hybrid()
    world.add("a", range(30))
    world.run()
    shared = [*range(14)]
    b, c = (world.add(name, [*shared, *range(token, token + 9)]) for name, token in (("b", 50), ("c", 70)))
    plan = world.step()
    # b begins after 8 tokens, and the spine knows 12: it saves there, and c waits for that.
    assert saves(plan) == [("b", 8, 4, 0, 4)]
    world.run()
    assert (b.num_cached_tokens, c.num_cached_tokens) == (8, 12)
    world.add("b", range(100, 121))  # another request: where the one before parted from others is not its concern
    assert [saves(plan)[0][2] for plan in world.run()] == [8, 8, 4, 1]


def test_the_interval_is_rounded_up_to_whole_blocks() -> None:
    world = hybrid(interval=5)
    world.add("a", range(13))
    assert [summary(plan) for plan in world.run()] == [[("a", 0, 8)], [("a", 8, 4)], [("a", 12, 1)]]


def test_without_slots_nothing_is_cached_and_no_step_is_cut() -> None:
    world = hybrid(num_slots=0)
    world.add("a", range(21))
    assert [saves(plan) for plan in world.run()] == [[("a", 0, 21, None, None)]]
    assert world.look_up(list(range(21))) == 0


# -- who waits ---------------------------------------------------------------------------------------------------------


def test_whoever_shares_with_a_running_request_waits_for_a_state_exactly_where_they_part() -> None:
    world = hybrid(interval=64, threshold=8)
    world.add("lead", range(40))
    world.add("f", [*range(22), 90, 91])  # five blocks of the leader's
    plans = [world.step() for _ in range(4)]
    assert [saves(plan) for plan in plans] == [
        [("lead", 0, 8, None, None)],
        [("lead", 8, 8, None, None)],
        [("lead", 16, 4, None, 0)],  # cut where they part
        [("lead", 20, 8, None, None), ("f", 20, 4, 0, 1)],
    ]
    assert world.requests["f"].num_cached_tokens == 20
    world.run()


def test_a_state_is_never_shared_within_the_step_that_saves_it() -> None:
    world = hybrid()
    a, b = world.add("a", range(9)), world.add("b", range(9))
    assert saves(world.step()) == [("a", 0, 8, None, 0)]
    assert saves(world.step()) == [("a", 8, 1, None, None), ("b", 8, 1, 0, None)]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)


def test_a_follower_computes_for_itself_when_the_step_of_its_leader_fails() -> None:
    world = hybrid()
    world.add("a", range(9))
    world.add("b", range(9))
    world.step(failing={"a"})
    assert saves(world.step()) == [("b", 0, 8, None, 0)]
    world.run()
    assert world.requests["b"].finish_reason == "length"


# -- decoding ----------------------------------------------------------------------------------------------------------


def test_while_decoding_only_the_latest_state_of_a_request_stays() -> None:
    world = hybrid(interval=64)
    world.add("a", range(6), max_tokens=13)
    held = []
    while world.scheduler.has_unfinished:
        world.step()
        held.append(world.scheduler.stats().gauges.num_checkpoints)
    # After 4 tokens (of the prompt), 8, 12, 16: the one at 4 stays, the others roll.
    assert held == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    turn = world.requests["a"].tokens.tolist()
    assert world.look_up([*turn, 1, 2]) == 4
    assert world.look_up([*turn[:13], 1, 2]) == 1


def test_a_rolling_state_that_somebody_used_stays() -> None:
    world = hybrid(interval=64)
    a = world.add("a", range(6), max_tokens=20)
    for _ in range(4):
        world.step()
    assert a.num_computed_tokens == 8
    turn = a.tokens.tolist()
    b = world.add("b", [*turn[:8], 77])
    world.step()
    assert b.num_cached_tokens == 8
    world.run()
    assert world.look_up([*turn[:8], 78]) == 2


# -- slots -------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_state_makes_room_and_what_was_used_stays() -> None:
    world = hybrid(num_slots=2, interval=64)
    for name, token in (("a", 100), ("b", 200)):
        world.add(name, range(token, token + 5))
        world.run()
    world.add("a2", range(100, 105))
    world.run()  # uses a's
    world.add("c", range(300, 305))
    world.run()
    assert [world.look_up(list(range(token, token + 5))) for token in (100, 200, 300)] == [1, 0, 1]


def test_a_slot_may_change_hands_in_the_step_that_loads_from_it() -> None:
    world = hybrid(num_slots=1, interval=64)
    world.add("a", range(5))
    world.run()
    world.add("b", range(10))
    plan = world.step()
    assert saves(plan) == [("b", 4, 4, 0, 0)]
    world.run()


def test_where_every_slot_is_being_saved_to_there_is_no_checkpoint_and_no_error() -> None:
    world = hybrid(num_slots=1, interval=64)
    world.add("a", range(5))
    world.add("b", range(50, 55))
    assert saves(world.step()) == [("a", 0, 4, None, 0), ("b", 0, 4, None, None)]
    world.run()


def test_the_state_goes_with_the_beginning_that_the_spine_forgets() -> None:
    world = hybrid()
    world.add("a", range(9))
    world.run()
    assert world.scheduler.stats().gauges.num_checkpoints == 1
    world.cache.pool.allocate(59)  # all but the first block
    assert world.scheduler.stats().gauges.num_checkpoints == 0


def test_a_failed_step_saves_nothing_and_returns_the_slot() -> None:
    world = hybrid()
    world.add("a", range(9))
    world.schedule()
    world.fail()
    assert world.scheduler.stats().gauges.num_checkpoints == 0
    world.add("b", range(9))
    assert saves(world.step()) == [("b", 0, 8, None, 0)]
    world.run()


def test_a_preempted_request_goes_on_from_its_last_state() -> None:
    world = hybrid(interval=64)
    a = world.add("a", range(6), max_tokens=8)
    for _ in range(4):
        world.step()
    world.scheduler.queues.preempt(a)
    assert saves(world.step()) == [("a", 8, 1, 1, None)]
    world.run()
    assert a.num_output_tokens == 8


def test_reset_forgets_every_state() -> None:
    for layout in (HYBRID, RECURRENT):
        world = hybrid(layout=layout)
        world.add("a", range(9), max_tokens=2)
        world.step()
        assert world.reset() is False
        world.run()
        assert world.reset() is True
        assert world.scheduler.stats().gauges.num_checkpoints == 0
        assert world.look_up(list(range(9))) == 0


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_state_slots"):
        CacheManager(4, 4, layout=HYBRID, num_state_slots=-1)
    with pytest.raises(ConfigError, match="state_checkpoint_interval"):
        CacheManager(4, 4, layout=HYBRID, state_checkpoint_interval=0)


def test_a_state_that_rolls_for_one_stays_when_another_has_a_reason_to_keep_it() -> None:
    checkpoints = Checkpoints(4, 64, 4)
    a, b = make_request("a", range(6)), make_request("b", range(9))
    assert checkpoints.stage(a, 8, Lineage(5)) == 0
    assert checkpoints.longest([Lineage(4), Lineage(5)], 2) == 0  # it is not there yet
    assert checkpoints.longest([Lineage(4), Lineage(5)], 2, with_pending=True) == 2
    checkpoints.commit(Lineage(5))
    assert checkpoints.stage(b, 8, Lineage(5)) is None  # b's last boundary
    assert checkpoints.stage(a, 12, Lineage(6)) == 1
    checkpoints.commit(Lineage(6))
    assert checkpoints.longest([Lineage(4), Lineage(5)], 2) == 2
    checkpoints.end(RequestId("a"))
    assert len(checkpoints) == 2
