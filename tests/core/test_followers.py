"""A beginning that one request computes over many steps is computed once, whoever else wants it, whatever happens.

With a budget of 8 the leader takes all of it, so nobody is admitted beside it. With a budget of 64 and a threshold of 8
there is room, and whoever shares its beginning follows it.
"""

from __future__ import annotations

import pytest
from core_plans import summary
from core_world import World, make_request

from anaphora.core.followers import Followers

BEGINNING = list(range(20))  # five blocks


@pytest.fixture(params=[{"budget": 8}, {"budget": 64, "threshold": 8}], ids=["no room", "following"])
def world(request: pytest.FixtureRequest) -> World:
    """`lead` computes the beginning in chunks of 8; `f1` and `f2` wait for it."""
    world = World(30, **request.param)
    world.add("lead", [*BEGINNING, 70], max_tokens=4)
    world.add("f1", [*BEGINNING, 80, 81], max_tokens=4)
    world.add("f2", [*BEGINNING, 90], max_tokens=4)
    return world


def computed(world: World) -> int:
    return world.scheduler.stats().counters.num_computed_prompt_tokens


def test_followers_compute_only_their_suffix(world: World) -> None:
    assert summary(world.step()) == [("lead", 0, 8)]
    assert summary(world.step()) == [("lead", 8, 8)]
    assert summary(world.step()) == [("lead", 16, 5), ("f1", 20, 2), ("f2", 20, 1)]
    world.run()
    assert computed(world) == 20 + 1 + 2 + 1


def test_a_follower_takes_over_what_an_aborted_leader_has_committed(world: World) -> None:
    world.step()
    world.finish("lead")
    assert summary(world.step()) == [("f1", 8, 8)]
    assert summary(world.step()) == [("f1", 16, 6), ("f2", 20, 1)]
    world.run()
    assert computed(world) == 20 + 2 + 1


def test_a_follower_takes_over_when_the_leaders_step_fails(world: World) -> None:
    world.step()
    world.step(failing={"lead"})  # blocks 2 and 3 are withdrawn, 0 and 1 stay
    assert summary(world.step()) == [("f1", 8, 8)]
    world.run()
    assert world.requests["f1"].finish_reason == world.requests["f2"].finish_reason == "length"
    assert computed(world) == 20 + 2 + 1


def test_a_leader_that_is_preempted_goes_on_where_it_was_and_is_still_the_only_one_to_compute(world: World) -> None:
    world.step()
    assert world.reset(preempt_running=True) is True  # and everything is forgotten
    assert summary(world.step()) == [("lead", 0, 8)]
    world.run()
    assert world.scheduler.stats().counters.num_recomputed_tokens == 8
    assert computed(world) == 20 + 1 + 2 + 1


def test_an_aborted_follower_leaves_the_others_waiting(world: World) -> None:
    world.step()
    world.finish("f1")
    world.step()
    assert summary(world.step()) == [("lead", 16, 5), ("f2", 20, 1)]
    world.run()


def test_a_request_with_another_beginning_shares_nothing_with_the_leader(world: World) -> None:
    stranger = world.add("stranger", range(300, 306))
    world.run()
    assert stranger.num_cached_tokens == 0


def following(world: World) -> int:
    return world.scheduler.stats().gauges.num_following


def test_whoever_shares_more_than_is_planned_follows_and_others_run_beside_the_leader() -> None:
    world = World(40, budget=64, threshold=8)
    world.add("lead", [*BEGINNING, 70], max_tokens=4)
    world.add("follows", [*BEGINNING, 80], max_tokens=4)
    world.add("shares two blocks", [*BEGINNING[:8], *range(90, 94)], max_tokens=4)
    world.add("stranger", range(200, 212), max_tokens=4)
    assert summary(world.step()) == [("lead", 0, 8), ("shares two blocks", 8, 4), ("stranger", 0, 8)]
    assert following(world) == 1
    assert summary(world.step()) == [("lead", 8, 8), ("shares two blocks", 12, 1), ("stranger", 8, 4)]
    assert summary(world.step())[0] == ("lead", 16, 5)
    assert following(world) == 0
    assert world.requests["follows"].num_cached_tokens == 20
    world.run()


def test_a_follower_leads_when_its_leader_ends_and_the_next_one_follows_it() -> None:
    world = World(40, budget=64, threshold=8)
    for name in ("lead", "f1", "f2"):
        world.add(name, [*BEGINNING, len(name), ord(name[-1])], max_tokens=4)
    world.step()
    assert following(world) == 2
    world.finish("lead")
    assert summary(world.step()) == [("f1", 8, 8)]
    assert following(world) == 1
    assert summary(world.step()) == [("f1", 16, 6), ("f2", 20, 2)]
    world.run()


# -- who waits for whom ------------------------------------------------------------------------------------------------


def test_a_follower_is_released_when_the_leader_has_all_the_blocks_that_they_share() -> None:
    followers = Followers()
    lead, short, long = (make_request(name, [1]) for name in ("lead", "short", "long"))
    followers.add(short, lead, 2)
    followers.add(long, lead, 5)
    assert followers.release(lead, 1) == []
    assert followers.release(lead, 4) == [short]
    assert len(followers) == 1
    assert followers.release(lead, 5) == [long]
    assert followers.release(lead, 9) == []
    assert len(followers) == 0


def test_every_follower_is_released_when_the_leader_is_gone() -> None:
    followers = Followers()
    lead, first, second = (make_request(name, [1]) for name in ("lead", "first", "second"))
    followers.add(first, lead, 2)
    followers.add(second, lead, 5)
    assert followers.release_all(lead) == [first, second]
    assert (len(followers), followers.release_all(lead)) == (0, [])


def test_a_follower_that_ends_waits_for_nobody() -> None:
    followers = Followers()
    lead, first, second = (make_request(name, [1]) for name in ("lead", "first", "second"))
    followers.add(first, lead, 2)
    followers.add(second, lead, 2)
    followers.discard(first)
    assert followers.release(lead, 2) == [second]
    followers.add(first, lead, 2)
    followers.discard(first)
    assert (len(followers), followers.release_all(lead)) == (0, [])
