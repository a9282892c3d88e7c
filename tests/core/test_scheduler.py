"""Who computes what: exact plans under budgets, orders and limits."""

from __future__ import annotations

import pytest
from core_plans import summary, tables
from core_world import World

from anaphora.core import CacheManager, Request, SampledToken, Scheduler, StepResult
from anaphora.core.ids import RequestId, TokenId
from anaphora.errors import (
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    InvalidTokenError,
    PromptTooLongError,
    UnknownRequestError,
)
from anaphora.sampling_params import SamplingParams

# -- prompts that are scored, and outputs of a minimal length ----------------------------------------------------------


def test_a_prompt_that_is_scored_is_computed_whole_and_found_by_others() -> None:
    world = World(12)
    world.add("a", range(11))
    world.step()
    scored = world.add("scored", range(11), scoring=True)
    world.add("b", range(11))
    assert summary(world.step()) == [("scored", 0, 11), ("b", 8, 3)]
    assert scored.num_cached_tokens == 0
    counters = world.scheduler.stats().counters
    assert (counters.num_queried_tokens, counters.num_hit_tokens, counters.num_bypassed_tokens) == (22, 8, 11)
    assert world.scheduler.stats().gauges.num_cached_blocks == 2  # of each content one copy


def test_a_cold_prompt_that_is_scored_leads_others() -> None:
    world = World(12, budget=8, threshold=6)
    world.add("scored", range(11), scoring=True)
    world.add("b", range(11))
    assert summary(world.step()) == [("scored", 0, 6)]
    assert world.scheduler.stats().gauges.num_following == 1
    assert summary(world.step()) == [("scored", 6, 5), ("b", 8, 3)]


def test_a_request_that_only_scores_ends_with_its_prompt_and_samples_nothing() -> None:
    world = World(8, budget=7)
    request = world.add("a", range(11), max_tokens=0, scoring=True)
    plans = world.run()
    assert [summary(plan) for plan in plans] == [[("a", 0, 7)], [("a", 7, 4)]]
    assert [plan.scheduled[0].sample for plan in plans] == [False, False]
    assert (request.output_token_ids, request.finish_reason) == ([], "length")
    assert world.look_up([*range(11), 11]) == 2


def test_no_end_token_ends_a_request_before_min_tokens_and_the_executor_knows_which_they_are() -> None:
    world = World(8)
    ends = {"eos": frozenset({10_002, 10_004}), "stop": (10_003,)}
    eos = world.add("eos", [1, 2], max_tokens=9, min_tokens=2, eos=ends["eos"], stop=ends["stop"])
    (admission,) = world.step().admitted
    assert admission.end_token_ids == {10_002, 10_003, 10_004}
    world.run()
    assert (eos.output_token_ids, eos.finish_reason) == ([10_002, 10_003, 10_004], "stop")
    stop = world.add("stop", [1], max_tokens=9, min_tokens=2, stop=ends["stop"])
    world.run()
    assert (stop.output_token_ids, stop.stop_reason) == ([10_001, 10_002, 10_003], 10_003)


def test_a_request_without_a_next_token_ends_alone_and_what_it_computed_stays() -> None:
    scheduler = Scheduler(CacheManager(8, 4))
    for name in ("a", "b"):
        scheduler.add(Request(name, range(10), SamplingParams(max_tokens=2)))
    plan = scheduler.schedule()
    assert plan is not None
    assert summary(plan) == [("a", 0, 10), ("b", 8, 2)]
    a, b = scheduler.update(plan, StepResult({RequestId("b"): SampledToken(TokenId(7))}, unsampled={"a": "no way on"}))
    assert (a.finish_reason, a.error, a.token) == ("error", "no way on", None)
    assert (b.finish_reason, b.error) == (None, None)
    stats = scheduler.stats()
    assert (stats.counters.num_failed_requests, stats.counters.num_committed_blocks) == (1, 2)
    assert stats.counters.num_computed_tokens == 12


# -- the budget --------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_samples_in_the_last_one() -> None:
    world = World(8, budget=7)
    world.add("a", range(17), max_tokens=2)
    plans = world.run()
    assert [summary(plan) for plan in plans] == [[("a", 0, 7)], [("a", 7, 7)], [("a", 14, 3)], [("a", 17, 1)]]
    assert [plan.scheduled[0].sample for plan in plans] == [False, False, True, True]
    assert [tables(plan)["a"] for plan in plans] == [(1, 2, 3, 4, 5), (), (), ()]  # blocks for every known token
    assert [sum(len(each.token_ids) for each in plan.scheduled) for plan in plans] == [7, 7, 3, 1]


def test_a_block_is_appended_when_decoding_reaches_it() -> None:
    world = World(8)
    world.add("a", range(7), max_tokens=4)
    assert [tables(plan)["a"] for plan in world.run()] == [(1, 2), (), (3,), ()]


def test_a_long_prompt_never_stalls_those_who_decode() -> None:
    world = World(20, budget=8)
    world.add("long", range(100, 130), max_tokens=1)
    world.add("d1", [1], max_tokens=6)
    world.add("d2", [2], max_tokens=6)
    assert summary(world.step()) == [("long", 0, 8)]
    assert summary(world.step()) == [("long", 8, 8)]
    assert summary(world.step()) == [("long", 16, 8)]
    assert summary(world.step()) == [("long", 24, 6), ("d1", 0, 1), ("d2", 0, 1)]

    world = World(20, budget=8)
    world.add("d1", [1], max_tokens=6)
    world.add("d2", [2], max_tokens=6)
    world.step()
    world.add("long", range(100, 130), max_tokens=1)
    assert summary(world.step()) == [("d1", 1, 1), ("d2", 1, 1), ("long", 0, 6)]
    assert summary(world.step()) == [("d1", 2, 1), ("d2", 2, 1), ("long", 6, 6)]


def test_a_running_request_of_better_rank_leaves_each_later_one_the_token_that_it_is_owed() -> None:
    world = World(20, budget=8, policy="priority")
    world.add("d1", [1], max_tokens=9, priority=1)
    world.add("d2", [2], max_tokens=9, priority=1)
    world.step()
    world.add("long", range(100, 130), max_tokens=1, priority=0)
    assert summary(world.step()) == [("d1", 1, 1), ("d2", 1, 1), ("long", 0, 6)]
    assert summary(world.step()) == [("long", 6, 6), ("d1", 2, 1), ("d2", 2, 1)]
    assert summary(world.step()) == [("long", 12, 6), ("d1", 3, 1), ("d2", 3, 1)]


def test_no_more_requests_run_than_max_num_seqs_and_none_more_than_the_budget_has_tokens() -> None:
    world = World(20, max_num_seqs=2)
    for name in ("a", "b", "c"):
        world.add(name, [1, 2], max_tokens=2)
    assert [summary(plan) for plan in world.run()] == [
        [("a", 0, 2), ("b", 0, 2)],
        [("a", 2, 1), ("b", 2, 1)],
        [("c", 0, 2)],
        [("c", 2, 1)],
    ]
    narrow = World(20, budget=2, max_num_seqs=8)
    assert narrow.scheduler.max_num_seqs == 2


# -- order -------------------------------------------------------------------------------------------------------------


def test_first_come_first_served_ignores_the_priority() -> None:
    world = World(20, max_num_seqs=1)
    world.add("a", [1], priority=5)
    world.add("b", [2], priority=-5)
    assert [plan.scheduled[0].request_id for plan in world.run()] == ["a", "b"]


def test_the_lower_priority_number_goes_first_and_then_the_earlier_arrival() -> None:
    world = World(20, max_num_seqs=1, policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        world.add(name, [ord(name)], priority=priority)
    assert [plan.scheduled[0].request_id for plan in world.run()] == ["d", "b", "e", "a", "c"]


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    world = World(4)
    world.add("a", range(100, 108), max_tokens=3)  # two blocks, then a third
    world.add("big", range(200, 212))  # three blocks
    world.add("small", [1])  # would fit at once
    assert [[name for name, _, _ in summary(plan)] for plan in world.run()] == [["a"], ["a"], ["a"], ["big", "small"]]


def test_a_prompt_that_can_never_fit_is_refused_at_once_and_the_others_do_not_notice() -> None:
    world = World(4)
    world.add("a", [1, 2], max_tokens=2)
    before = world.snapshot()
    with pytest.raises(PromptTooLongError, match=r"17 tokens.*pool holds 16.*4 blocks of 4.*num_blocks"):
        world.add("b", range(17))
    assert world.snapshot() == before
    world.add("c", range(16))  # the whole pool
    assert [[name for name, _, _ in summary(plan)] for plan in world.run()] == [["a"], ["a"], ["c"]]


def test_a_prompt_without_room_for_one_token_more_is_refused() -> None:
    world = World(40, max_model_len=10)
    with pytest.raises(PromptTooLongError, match=r"10 tokens.*shorten it to 9 or less"):
        world.add("a", range(10))
    world.add("b", range(9))
    world.run()
    assert world.requests["b"].finish_reason == "length"


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_request_that_fills_the_pool_ends_one_token_later() -> None:
    world = World(3)
    request = world.add("a", range(10), max_tokens=99)
    world.run()
    assert (request.finish_reason, request.num_tokens, request.num_output_tokens) == ("length", 13, 3)


def test_the_context_limit_counts_prompt_and_output() -> None:
    world = World(9, max_model_len=12)
    request = world.add("a", range(10), max_tokens=99)
    world.run()
    assert (request.finish_reason, request.num_tokens) == ("length", 12)


@pytest.mark.parametrize(
    ("eos", "stop", "num_output", "reason", "stop_reason"),
    [
        (frozenset({10_004}), (), 2, "stop", None),
        (frozenset(), (10_003,), 1, "stop", 10_003),
        (frozenset({10_003}), (10_003,), 1, "stop", None),
        (frozenset({10_099}), (10_098,), 5, "length", None),
    ],
)
def test_end_tokens_and_stop_tokens_end_a_request(
    eos: frozenset[int], stop: tuple[int, ...], num_output: int, reason: str, stop_reason: int | None
) -> None:
    world = World(9)
    request = world.add("a", [1, 2, 3], max_tokens=5, eos=eos, stop=stop)
    world.run()
    assert request.output_token_ids == [10_003 + index for index in range(num_output)]
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)


def test_ignore_eos_goes_past_the_models_own_end_token() -> None:
    request = Request("a", [1], SamplingParams(ignore_eos=True), eos_token_ids=frozenset({5}))
    assert request.eos_token_ids == frozenset()


def test_finish_between_steps_takes_effect_at_once() -> None:
    world = World(9)
    request = world.add("a", range(9), max_tokens=9)
    world.step()
    world.finish("a")
    assert (request.finish_reason, request.is_finished) == ("abort", True)
    assert world.scheduler.stats().gauges.num_live_blocks == 0
    assert not world.scheduler.has_unfinished
    assert world.look_up(range(9)) == 2  # what it computed stays findable


def test_finish_while_a_step_is_in_flight_takes_effect_with_it_and_drops_the_token() -> None:
    world = World(9)
    request = world.add("a", range(9), max_tokens=9)
    world.schedule()
    world.finish("a", "stop")
    assert not request.is_finished
    (update,) = world.update()
    assert (update.token, update.finish_reason) == (None, "stop")
    assert request.output_token_ids == []
    assert world.look_up(range(9)) == 2


def test_a_waiting_request_can_be_ended_while_others_are_in_flight() -> None:
    world = World(9, max_num_seqs=1)
    world.add("a", [1], max_tokens=2)
    waiting = world.add("b", [2])
    world.add("c", [3])
    world.schedule()
    world.finish("b")
    assert waiting.is_finished
    world.update()
    assert [plan.scheduled[0].request_id for plan in world.run()] == ["a", "c"]


def test_every_released_request_is_named_once_in_the_next_plan() -> None:
    world = World(9)
    world.add("a", [1])
    world.add("b", [2], max_tokens=3)
    assert world.step().released == ()
    assert world.step().released == ("a",)
    world.finish("b")
    world.add("b", [7])  # the id is free again
    plan = world.step()
    assert (plan.released, plan.admitted[0].token_ids) == (("b",), (7,))


def test_the_same_id_twice_and_an_unknown_id_are_refused() -> None:
    world = World(9)
    world.add("a", [1])
    with pytest.raises(DuplicateRequestError, match="'a'"):
        world.add("a", [2])
    with pytest.raises(UnknownRequestError, match="'b'"):
        world.finish("b")


def test_there_is_no_plan_without_work() -> None:
    world = World(9)
    assert world.schedule() is None
    world.add("a", [1])
    world.run()
    assert world.schedule() is None


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["1"], [None]])
def test_token_ids_that_are_no_unsigned_32_bit_integers_are_refused(tokens: list[object]) -> None:
    with pytest.raises(InvalidTokenError):
        Request("a", tokens, SamplingParams())  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(EmptyPromptError):
        Request("a", [], SamplingParams())


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 0}, {"max_num_seqs": 0}, {"policy": "shortest"}, {"policy": "FCFS"}]
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Scheduler(CacheManager(4, 4), **options)  # type: ignore[arg-type]


# -- the cache at work -------------------------------------------------------------------------------------------------


def test_a_second_turn_computes_only_what_is_new() -> None:
    world = World(20)
    first = world.add("a", range(9), max_tokens=5)
    world.run()
    turn = [*first.tokens, 7, 7, 7]  # 17 tokens; 13 of them have K/V, so three blocks
    second = world.add("b", turn)
    assert summary(world.step()) == [("b", 12, 5)]
    assert second.num_cached_tokens == 12


def test_repeating_a_prompt_of_whole_blocks_computes_its_last_block_again_and_leaves_one_copy() -> None:
    world = World(6)
    for repetition in range(4):
        world.add(str(repetition), range(12))
        assert summary(world.step()) == [(str(repetition), 8, 4) if repetition else ("0", 0, 12)]
    counters, gauges = world.scheduler.stats().counters, world.scheduler.stats().gauges
    assert (counters.num_duplicate_blocks, counters.num_evicted_blocks) == (3, 0)
    assert (gauges.num_cached_blocks, gauges.num_blank_blocks) == (3, 3)


def test_reset_while_requests_run_needs_to_preempt_them() -> None:
    world = World(9)
    request = world.add("a", range(9), max_tokens=3)
    world.step()
    assert world.reset() is False
    assert world.look_up(range(9)) == 2
    assert world.reset(preempt_running=True) is True
    assert world.look_up(range(9)) == 0
    assert summary(world.step()) == [("a", 0, 10)]
    world.run()
    assert (request.num_preemptions, request.output_token_ids) == (1, [10_009, 10_010, 10_011])


def test_reset_has_no_effect_while_a_step_is_in_flight() -> None:
    world = World(9)
    world.add("a", range(9))
    world.schedule()
    assert world.reset(preempt_running=True) is False
    world.update()
    assert world.look_up(range(9)) == 2


def test_two_schedulers_share_nothing() -> None:
    one, other = World(9), World(9)
    one.add("a", range(9))
    one.run()
    assert (one.look_up(range(9)), other.look_up(range(9))) == (2, 0)
