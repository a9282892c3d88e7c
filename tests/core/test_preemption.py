"""When the pool runs dry, the worst rank gives its blocks back and finds them again."""

from __future__ import annotations

from core_plans import summary, tables
from core_world import World


def test_the_worst_rank_is_preempted_and_finds_its_own_blocks_again() -> None:
    world = World(5)
    world.add("a", range(8), max_tokens=2)
    late = world.add("b", range(100, 111), max_tokens=3)
    assert summary(world.step()) == [("a", 0, 8), ("b", 0, 11)]
    plan = world.step()  # a needs a third block and there is none
    assert (summary(plan), plan.released) == ([("a", 8, 1)], ("b",))
    assert tables(plan) == {"a": (5,)}  # b's last block, which was not full: nothing that can be found is lost
    assert (late.num_preemptions, late.num_computed_tokens, late.num_cached_tokens) == (1, 0, 0)
    plan = world.step()
    assert (summary(plan), plan.released) == ([("b", 8, 4)], ("a",))
    assert plan.admitted[0].token_ids == (*range(100, 111), 10_011)
    assert tables(plan) == {"b": (3, 4, 5)}
    world.run()
    assert late.output_token_ids == [10_011, 10_012, 10_013]
    counters = world.scheduler.stats().counters
    assert (counters.num_preemptions, counters.num_requeried_tokens, counters.num_rehit_tokens) == (1, 12, 8)
    assert (counters.num_recomputed_tokens, counters.num_computed_prompt_tokens) == (3, 19)
    assert (counters.num_queried_tokens, counters.num_hit_tokens) == (19, 0)


def test_a_request_that_is_itself_the_worst_gives_way() -> None:
    world = World(4)
    world.add("a", range(7), max_tokens=9)
    world.add("b", range(100, 108), max_tokens=2)
    assert summary(world.step()) == [("a", 0, 7), ("b", 0, 8)]
    plan = world.step()  # a has room in its second block; b needs a third one and there is none
    assert (summary(plan), plan.released) == ([("a", 7, 1)], ("b",))
    assert world.requests["b"].num_preemptions == 1
    world.run()
    assert [request.num_output_tokens for request in world.requests.values()] == [9, 2]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    world = World(5, policy="priority")
    world.add("a", range(8), max_tokens=3, priority=0)
    world.add("b", range(100, 108), max_tokens=3, priority=5)
    world.step()
    world.add("c", [1], priority=1)
    plan = world.step()  # a takes the last block, b needs one too and goes: two are free now
    assert (summary(plan), plan.released) == ([("a", 8, 1)], ("b",))
    assert summary(world.step()) == [("a", 9, 1), ("c", 0, 1)]


def test_by_priority_the_highest_number_is_preempted_whenever_it_came() -> None:
    world = World(5, policy="priority")
    world.add("low", range(8), max_tokens=3, priority=9)
    world.add("high", range(100, 111), max_tokens=3, priority=1)
    assert summary(world.step()) == [("high", 0, 11), ("low", 0, 8)]
    assert summary(world.step()) == [("high", 11, 1)]  # low needs a third block
    assert (world.requests["low"].num_preemptions, world.requests["high"].num_preemptions) == (1, 0)
    world.run()


def test_a_preempted_request_goes_before_those_who_came_later() -> None:
    world = World(5, max_num_seqs=2)
    world.add("a", range(8), max_tokens=2)
    world.add("b", range(100, 111), max_tokens=3)
    world.add("c", [1])
    world.step()
    assert summary(world.step()) == [("a", 8, 1)]
    assert [name for name, _, _ in summary(world.step())] == ["b", "c"]


def test_a_preempted_request_keeps_the_cached_tokens_of_its_first_admission() -> None:
    world = World(6)
    world.add("first", range(100, 109))
    world.run()
    world.add("a", range(8), max_tokens=9)
    late = world.add("b", range(100, 111), max_tokens=3)
    world.step()
    assert late.num_cached_tokens == 8
    world.run()
    assert (late.num_preemptions, late.num_cached_tokens) == (1, 8)


def test_preempting_gives_back_blocks_that_are_shared_only_once_their_last_owner_goes() -> None:
    world = World(6)
    world.add("a", range(8), max_tokens=12)
    world.add("b", [*range(8), 50, 51], max_tokens=12)
    world.step()
    assert world.cache.pool.ref_counts[:3] == [0, 2, 2]
    while not world.requests["b"].num_preemptions:
        world.step()
    assert world.cache.pool.ref_counts[:3] == [0, 1, 1]
    world.run()
    assert [request.num_output_tokens for request in world.requests.values()] == [12, 12]


def test_a_waiting_request_is_admitted_as_soon_as_it_fits() -> None:
    world = World(10, policy="priority")
    world.add("first", range(100, 115), max_tokens=3, priority=0)  # four blocks, then a fifth
    world.add("waits", [*range(20), *range(50, 58)], priority=5)  # seven blocks: one too many
    world.step()
    world.add("sharer", [*range(20), 70], max_tokens=9, priority=1)  # five blocks are those of the waiting one
    assert [name for name, _, _ in summary(world.step())] == ["first", "sharer"]
    world.step()  # the first one ends
    assert world.requests["first"].is_finished
    gauges = world.scheduler.stats().gauges
    assert gauges.num_cached_blocks + gauges.num_blank_blocks >= 2  # two are enough: five of its blocks have an owner
    assert [name for name, _, _ in summary(world.step())] == ["sharer", "waits"]


def test_a_preempted_request_that_scores_its_prompt_finds_only_what_it_computed_itself() -> None:
    world = World(8, threshold=4)
    world.add("x", [1, 2, 3], max_tokens=9)
    world.add("warm", range(11), max_tokens=9)
    for _ in range(3):
        world.step()
    scored = world.add("scored", range(11), scoring=True)
    assert summary(world.step()) == [("x", 5, 1), ("warm", 11, 1), ("scored", 0, 4)]
    assert summary(world.step()) == [("x", 6, 1), ("warm", 12, 1)]
    assert scored.num_preemptions == 1  # GUARD
    assert world.look_up(range(11)) == 2  # GUARD: more is there than it has computed
    assert summary(world.step()) == [("x", 7, 1), ("warm", 13, 1), ("scored", 4, 4)]
    world.run()
    assert world.scheduler.stats().counters.num_bypassed_tokens == 11
