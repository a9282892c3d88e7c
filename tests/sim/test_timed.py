"""Timed replay: the scheduler's own steps on a clock that only the cost model moves."""

from __future__ import annotations

import pytest

from anaphora.errors import ConfigError
from anaphora.sim import Trace, TraceRequest
from anaphora.sim.cost_model import CostModel
from anaphora.sim.timed import TimedOptions, replay_timed

SECOND_A_STEP = TimedOptions(CostModel(overhead_s=1.0, token_s=0.0, attention_s=0.0), max_num_batched_tokens=1024)


def one(timestamp_ms: float, length: int, output: int, *ids: int) -> TraceRequest:
    return TraceRequest(timestamp_ms, length, output, ids)


def test_the_parts_of_the_time_to_first_token() -> None:
    """At 1,024 tokens a step: the first prompt takes two steps, the second one arrives during the first of them."""
    trace = Trace("t", 512, [one(0, 2048, 1, 1, 2, 3, 4), one(500, 512, 1, 9)])
    first, second = replay_timed(trace, 100, 512, options=SECOND_A_STEP).times
    assert (first.queue_s, first.wait_s, first.compute_s, first.ttft_s) == (0.0, 0.0, 2.0, 2.0)
    assert (second.admitted_s, second.queue_s, second.wait_s, second.compute_s) == (2.0, 1.5, 0.0, 1.0)


def test_what_a_step_spends_on_others_is_waiting() -> None:
    """One step: 2 + 5 tokens at a second each, and half a second of overhead."""
    trace = Trace("t", 512, [one(0, 2, 1, 1), one(0, 5, 1, 2)])
    first, second = replay_timed(trace, 100, 512, options=TimedOptions(CostModel(0.5, 1.0, 0.0))).times
    assert (first.queue_s, first.compute_s, first.wait_s) == (0.0, 2.5, 5.0)
    assert (second.queue_s, second.compute_s, second.wait_s) == (0.0, 5.5, 2.0)


def test_who_comes_second_hits_what_the_first_one_computed() -> None:
    trace = Trace("t", 512, [one(0, 2048, 1, 1, 2, 3, 4), one(0, 2048, 1, 1, 2, 3, 5)])
    result = replay_timed(trace, 100, 512, options=SECOND_A_STEP)
    assert [times.ttft_s for times in result.times] == [2.0, 3.0]
    assert result.counters.num_hit_tokens == 1536
    assert result.counters.num_computed_tokens == 2048 + 512


def test_the_cost_model_counts_tokens_and_pairs() -> None:
    """A prompt of 3 tokens, then one token that attends to 4 positions."""
    trace = Trace("t", 512, [one(0, 3, 2, 1)])
    result = replay_timed(trace, 10, 512, options=TimedOptions(CostModel(10.0, 1.0, 0.125)))
    assert result.times[0].first_token_s == 10 + 3 + 6 * 0.125
    assert result.duration_s == result.times[0].finished_s == 10 + 3 + 6 * 0.125 + 10 + 1 + 4 * 0.125


def test_the_clock_jumps_to_the_next_arrival_and_scales_it() -> None:
    trace = Trace("t", 512, [one(60_000, 512, 1, 1), one(120_000, 512, 1, 2)])
    options = TimedOptions(CostModel(1.0, 0.0, 0.0), arrival_scale=2.0)
    assert replay_timed(trace, 10, 512, options=options).duration_s == 241.0


def test_prompts_that_cannot_fit_are_refused_and_outputs_that_cannot_are_cut() -> None:
    """One block of 512 holds a prompt of 512 and lets one more token be known."""
    trace = Trace("t", 512, [one(0, 513, 1, 1, 2), one(0, 512, 5, 3)])
    result = replay_timed(trace, 1, 512)
    assert (result.num_refused, len(result.times), result.num_cut) == (1, 1, 1)
    assert result.counters.num_generated_tokens == 1


def test_generated_blocks_without_ids_are_cached_as_in_the_engine_and_never_found() -> None:
    """The first request computes its prompt's block and two of its output; the second one finds the first of them."""
    trace = Trace("t", 4, [one(0, 4, 9, 1), one(100_000, 8, 1, 1, 2)])
    result = replay_timed(trace, 4, 4)
    assert result.counters.num_hit_tokens == 4
    assert result.counters.num_committed_blocks == 3 + 1


def test_generated_blocks_with_ids_are_found_by_the_next_turn() -> None:
    first = TraceRequest(0, 5, 8, (1, 9), (2, 3))  # 12 of its 13 tokens are computed
    second = TraceRequest(100_000, 13, 1, (1, 2, 3, 4))
    result = replay_timed(Trace("t", 4, [first, second]), 10, 4)
    assert [times.num_cached_tokens for times in result.times] == [0, 12]


def test_nobody_waits_for_blocks_that_are_not_known_yet() -> None:
    """The engine cannot know what a request will generate, so a prompt that begins with that does not follow it."""
    first, second = TraceRequest(0, 4, 9, (1,), (2, 3)), TraceRequest(0, 12, 1, (1, 2, 3))
    times = replay_timed(Trace("t", 4, [first, second]), 10, 4, options=SECOND_A_STEP).times
    assert [entry.first_token_s for entry in times] == [1.0, 1.0]


@pytest.mark.parametrize("values", [(-1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (float("nan"), 1.0, 0.0)])
def test_a_cost_model_that_makes_no_sense_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError):
        CostModel(*values)


def test_an_arrival_scale_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="arrival_scale"):
        TimedOptions(arrival_scale=0.0)
