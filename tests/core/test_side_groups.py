"""Windows and chunks beside full attention, or alone: what is held, given back, found, and what a request may take."""

from __future__ import annotations

import pytest
from core_world import World

from anaphora.core import AttentionKind, CacheLayout, CacheManager, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.core.ids import BlockId, RequestId
from anaphora.core.plan import StepPlan
from anaphora.core.stats import GroupGauges
from anaphora.errors import ConfigError, PromptTooLongError


def layout(*kinds: AttentionKind) -> CacheLayout:
    return CacheLayout(kinds)


MIXED = layout(FullAttention(), SlidingWindow(6))


def tables(plan: StepPlan) -> dict[RequestId, tuple[tuple[BlockId, ...], ...]]:
    return {entry.request_id: entry.new_block_ids for entry in plan.scheduled}


def side_table(world: World, request_id: str, number: int = 0) -> list[BlockId]:
    return world.cache.sides[number].tables[RequestId(request_id)].blocks


def num_held(world: World, request_id: str, number: int = 0) -> int:
    return world.cache.sides[number].tables[RequestId(request_id)].num_held


# -- kinds -------------------------------------------------------------------------------------------------------------


def test_first_visible_positions_at_the_borders_of_a_window_and_of_a_chunk() -> None:
    assert [SlidingWindow(3).first_visible(position) for position in range(6)] == [0, 0, 0, 1, 2, 3]
    assert [SlidingWindow(1).first_visible(position) for position in range(3)] == [0, 1, 2]
    assert [ChunkedAttention(3).first_visible(position) for position in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert [FullAttention().first_visible(position) for position in (0, 7)] == [0, 0]


def test_a_layout_that_makes_no_sense_is_refused() -> None:
    for kind in (SlidingWindow, ChunkedAttention):
        with pytest.raises(ConfigError, match="at least one"):
            kind(0)
    with pytest.raises(ConfigError, match="nothing to cache"):
        CacheLayout(())
    with pytest.raises(ConfigError, match="only the first"):
        layout(SlidingWindow(3), FullAttention())


# -- what is held and given back ---------------------------------------------------------------------------------------


def test_a_window_that_is_no_multiple_of_the_block_is_given_back_block_by_block() -> None:
    world = World(40, 4, budget=8, layout=MIXED)
    world.add("a", range(20), max_tokens=9)
    seen = []
    for _ in range(4):
        plan = world.step()
        seen.append((tables(plan)["a"], list(side_table(world, "a"))))
    assert seen == [
        (((1, 2, 3, 4, 5), (6, 7)), [6, 7]),  # the token at 8 sees positions from 3 on
        (((), (8, 9)), [0, 0, 8, 9]),  # the one at 16 from 11 on: the third block
        (((), (10,)), [0, 0, 0, 9, 10]),  # the one at 20 from 15 on
        (((11,), (12,)), [0, 0, 0, 0, 10, 12]),  # the one at 21 from 16 on
    ]
    assert world.scheduler.stats().groups == (
        GroupGauges("full attention", 6, 0),
        GroupGauges("sliding window of 6", 2, 4),
    )


def test_a_hit_takes_the_visible_blocks_and_the_null_block_stands_for_the_others() -> None:
    world = World(40, 4, budget=8, layout=MIXED)
    world.add("a", range(20), max_tokens=9)
    world.run()
    b = world.add("b", range(20))
    plan = world.step()
    assert b.num_cached_tokens == 16
    assert tables(plan)["b"] == ((1, 2, 3, 4, 15), (0, 0, 8, 9, 16))  # the token at 16 sees positions from 11 on


def test_what_was_given_back_is_still_found_and_ends_a_shorter_hit() -> None:
    world = World(40, 4, budget=8, layout=MIXED)
    world.add("a", range(20))
    for _ in range(3):
        world.step()
    assert [world.look_up([*range(length), 99]) for length in (4, 8, 12, 16, 20)] == [1, 2, 3, 4, 5]


def test_chunks_are_given_back_at_their_border_and_not_before() -> None:
    world = World(40, 4, budget=4, layout=layout(FullAttention(), ChunkedAttention(8)))
    world.add("a", range(20))
    held = []
    while world.scheduler.has_unfinished:
        world.step()
        if world.scheduler.has_unfinished:
            held.append(num_held(world, "a"))
    assert held == [1, 0, 1, 0]
    world.add("b", range(9))  # its hit ends at the border of a chunk: nothing before it is seen
    plan = world.step()
    assert tables(plan)["b"][1][:2] == (0, 0)
    assert world.requests["b"].num_cached_tokens == 8


def test_a_chunk_border_inside_a_block() -> None:
    world = World(40, 4, layout=layout(FullAttention(), ChunkedAttention(6)))
    world.add("a", range(20))
    world.run()
    for length, first in ((5, 0), (9, 1), (13, 3), (17, 3)):  # the tokens at 4, 8, 12, 16 see 0, 6, 12, 12 and on
        request = world.add(f"b{length}", range(length))
        plan = world.step()
        blocks = tables(plan)[RequestId(f"b{length}")][1]
        assert (request.num_cached_tokens, [block == 0 for block in blocks]) == (
            length - 1,
            [index < first for index in range(length // 4 + 1)],
        )


def test_a_window_larger_than_the_prompt_gives_nothing_back() -> None:
    world = World(40, 4, budget=8, layout=layout(FullAttention(), SlidingWindow(100)))
    world.add("a", range(20))
    world.step()
    world.step()
    assert side_table(world, "a") == [6, 7, 8, 9]
    world.run()
    world.add("b", range(20))
    assert tables(world.step())["b"] == ((1, 2, 3, 4, 11), (6, 7, 8, 9, 12))


def test_a_window_of_one_token_holds_the_block_in_work_only() -> None:
    world = World(40, 4, budget=6, layout=layout(FullAttention(), SlidingWindow(1)))
    world.add("a", range(20))
    world.step()
    assert side_table(world, "a") == [0, 7]
    world.run()
    world.add("b", range(20))
    assert tables(world.step())["b"][1] == (0, 0, 0, 0, 12)
    assert world.requests["b"].num_cached_tokens == 16


def test_where_all_layers_are_windowed_a_request_is_longer_than_the_pool() -> None:
    world = World(8, 4, budget=8, layout=layout(SlidingWindow(6)))
    assert world.cache.capacity_tokens == 8 * 8 * 4  # the entries of the virtual spine
    world.add("a", range(60), max_tokens=40)
    plan = world.step()
    assert tables(plan)["a"] == ((1, 2),)
    world.run()
    assert world.requests["a"].num_output_tokens == 40
    assert world.scheduler.stats().groups == (GroupGauges("sliding window of 6", 0, 7),)  # the last block is not full


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("kind", [SlidingWindow, ChunkedAttention])
def test_between_steps_a_request_holds_no_more_than_its_window_and_two_blocks(kind: type, size: int) -> None:
    world = World(60, 4, budget=7, layout=layout(FullAttention(), kind(size)))
    world.add("a", range(50), max_tokens=30)
    most = 0
    while world.scheduler.has_unfinished:
        world.step()
        if world.scheduler.has_unfinished:
            most = max(most, num_held(world, "a"))
    assert most <= -(-size // 4) + 1


# -- what fits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "num_blocks", "capacity"),
    [
        ((FullAttention(),), 10, 40),
        ((FullAttention(), SlidingWindow(100)), 10, 20),  # two blocks for each four tokens
        ((FullAttention(), SlidingWindow(4)), 10, 32),  # the window takes two blocks at most
        ((FullAttention(), SlidingWindow(1)), 10, 36),
        ((FullAttention(), SlidingWindow(5), ChunkedAttention(4)), 10, 24),
        ((SlidingWindow(4),), 2, 2 * 8 * 4),
        ((SlidingWindow(4),), 1, 4),
        ((SlidingWindow(4), SlidingWindow(4)), 3, 4),
    ],
)
def test_the_capacity_counts_every_group(kinds: tuple[AttentionKind, ...], num_blocks: int, capacity: int) -> None:
    cache = CacheManager(num_blocks, 4, layout=layout(*kinds))
    assert cache.capacity_tokens == capacity
    world = World(num_blocks, 4, layout=layout(*kinds))
    with pytest.raises(PromptTooLongError, match=f"holds {capacity} "):
        world.add("long", range(capacity + 1))
    request = world.add("a", range(capacity - 1), max_tokens=9)
    world.run()
    assert (request.num_output_tokens, request.finish_reason) == (2, "length")  # one more than fits


def test_a_pool_without_a_block_for_each_group_is_refused() -> None:
    CacheManager(3, 4, layout=layout(FullAttention(), SlidingWindow(4), ChunkedAttention(4)))
    with pytest.raises(ConfigError, match="3 groups"):
        CacheManager(2, 4, layout=layout(FullAttention(), SlidingWindow(4), ChunkedAttention(4)))


def test_a_step_computes_no_more_than_the_side_groups_can_hold() -> None:
    # 12 blocks: five of the spine leave seven. In a window of 5, c tokens take at most cdiv(c + 3, 4) + 1 blocks.
    world = World(12, 2, budget=64, layout=layout(FullAttention(), SlidingWindow(3)))
    world.add("a", range(16))  # eight blocks leave four: cdiv(c + 1, 2) + 1 <= 4
    plans = world.run()
    assert [len(plan.scheduled[0].token_ids) for plan in plans] == [5, 5, 5, 1]


def test_an_admission_counts_on_what_running_requests_were_promised() -> None:
    world = World(20, 2, budget=8, threshold=4, layout=layout(FullAttention(), SlidingWindow(5)))
    # Eight of the spine and cdiv(5 + 4 - 2, 2) + 1 = 5 at once: three of them only from the second chunk on.
    world.add("a", range(16))
    world.add("b", range(50, 58))  # four and four
    plan = world.step()
    assert [entry.request_id for entry in plan.scheduled] == ["a"]
    assert world.cache.pool.num_free == 20 - 8 - 2
    assert world.cache.num_available == 20 - 8 - 5
    world.run()
    assert world.scheduler.stats().counters.num_preemptions == 0


# -- sharing, failing, forgetting --------------------------------------------------------------------------------------


def test_requests_of_one_step_share_the_blocks_of_every_group_and_fail_with_their_writer() -> None:
    world = World(40, 4, layout=MIXED)
    world.add("w", range(12))
    world.add("r", [*range(12), 50])
    world.add("other", range(100, 105))
    plan = world.schedule()
    assert plan is not None
    assert tables(plan)["w"] == ((1, 2, 3), (4, 5, 6))
    assert tables(plan)["r"] == ((1, 2, 3, 7), (0, 5, 6, 8))  # the token at 12 sees positions from 7 on
    world.update(failing={"w"})
    reasons = {name: request.finish_reason for name, request in world.requests.items()}
    assert reasons == {"w": "error", "r": "error", "other": "length"}
    assert world.look_up(list(range(13))) == 0


def forget_side_blocks(world: World) -> None:
    for lineage in world.cache.spine.index.committed_lineages:
        world.cache.pool.forget_sides(lineage)


def test_a_reader_of_a_pending_side_block_fails_with_its_writer_though_the_spine_is_committed() -> None:
    world = World(40, 4, layout=MIXED)
    world.add("a", range(12))
    world.run()
    forget_side_blocks(world)
    world.add("w", range(12))
    world.add("r", [*range(12), 50])
    plan = world.schedule()
    assert plan is not None
    assert [(entry.request_id, entry.start) for entry in plan.scheduled] == [("w", 0), ("r", 12)]
    world.update(failing={"w"})
    assert world.requests["r"].finish_reason == "error"
    assert world.look_up([*range(12), 50]) == 0


def test_a_hit_that_a_window_cuts_counts_what_is_used() -> None:
    world = World(40, 4, layout=MIXED)
    world.add("a", range(12))
    world.run()
    forget_side_blocks(world)
    b = world.add("b", range(12))
    world.step()
    assert (b.num_cached_tokens, world.scheduler.stats().counters.num_hit_tokens) == (0, 0)
    assert world.look_up(list(range(13))) == 3  # what was computed again is found


def test_a_failed_step_leaves_nothing_of_any_group() -> None:
    world = World(40, 4, layout=MIXED)
    world.add("a", range(12))
    world.schedule()
    world.fail()
    assert world.look_up(list(range(13))) == 0
    assert world.scheduler.stats().gauges.num_blank_blocks == 40


def test_when_the_spine_forgets_a_beginning_the_side_blocks_of_it_are_blank() -> None:
    world = World(12, 4, layout=layout(FullAttention(), SlidingWindow(4)))
    world.add("a", range(8))
    world.run()
    pool = world.cache.pool
    assert (pool.free_queue.num_blank, pool.free_queue.num_cached) == (8, 4)
    pool.allocate(10)  # the window's first block goes, then the spine's last one, and with it the window's last one
    assert (pool.free_queue.num_blank, pool.free_queue.num_cached, pool.num_evicted) == (1, 1, 3)
    assert len(pool.sides) == 0


def test_a_block_that_was_computed_again_replaces_the_one_before() -> None:
    world = World(40, 4, layout=MIXED)
    world.add("a", range(8), max_tokens=6)
    world.step()
    pool = world.cache.pool
    first = side_table(world, "a")[0]
    assert pool.sides.is_labelled(first)
    world.add("b", range(8), scoring=True)  # looks nothing up and computes everything
    world.step()
    assert not pool.sides.is_labelled(first)
    assert len(pool.sides) == 2
    world.run()
    assert world.scheduler.stats().groups[1].num_cached_blocks == 3


def test_a_preempted_request_finds_its_windows_again() -> None:
    world = World(30, 2, budget=8, layout=layout(FullAttention(), SlidingWindow(5)))
    world.add("a", range(15), max_tokens=6)
    world.step()
    world.step()
    assert world.requests["a"].num_output_tokens == 1
    world.scheduler.queues.preempt(world.requests["a"])
    plan = world.step()
    assert plan.scheduled[0].start == 14
    world.run()


def test_reset_forgets_every_group_of_a_virtual_spine_too() -> None:
    world = World(10, 2, layout=layout(SlidingWindow(5), ChunkedAttention(4)))
    world.add("a", range(9), max_tokens=2)
    world.step()
    assert world.reset() is False
    world.run()
    assert world.look_up(list(range(9))) == 4
    assert world.reset() is True
    assert world.look_up(list(range(9))) == 0
    assert (world.cache.spine.free_queue.num_cached, world.cache.pool.free_queue.num_cached) == (0, 0)
