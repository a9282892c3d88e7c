"""Claims: a figure is given where it was measured, a difference only where it is shown, and what to doubt, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from anaphora.bench import findings, summary
from anaphora.bench.cases import Case
from anaphora.bench.measurement import Sample, Wave
from anaphora.bench.trial import Trial

CASE = Case(64, 1, 1)


def sample(ttft_s: float = 0.1, cached: int | None = 0, output_tokens: int = 1, prompt_tokens: int = 96) -> Sample:
    return Sample(prompt_tokens, cached, output_tokens, ttft_s, ttft_s + 0.01 * (output_tokens - 1))


def wave(phase: str, *samples: Sample, counters: dict[str, int] | None = None) -> Wave:
    return Wave(phase, 1.0, samples or (sample(),), counters)


def trials(*waves: Wave, case: Case = CASE, count: int = 6, target: str = "a", first: int = 0) -> list[Trial]:
    return [Trial(case.name, number, target, waves) for number in range(first, first + count)]


def document(
    made: Sequence[Trial], case: Case = CASE, *, caching: bool | None = True, **changes: Any
) -> dict[str, Any]:
    targets = dict.fromkeys((trial.target for trial in made), caching)
    return {
        "rows": summary.rows([case], made, targets),
        "comparisons": summary.comparisons([case], made, "a"),
        "counter_examples": summary.counter_examples([case], made),
        "not_run": [],
        "num_resumed_trials": 0,
        "is_cut_short": False,
    } | changes


def said(*arguments: Any, **changes: Any) -> str:
    return "\n".join(findings.statements(document(*arguments, **changes)))


HIT = (wave("first", sample(0.3)), wave("warm", sample(0.1, cached=64)), wave("suffix", sample(0.1)))


def test_what_a_hit_is_worth_is_said_where_it_was_measured() -> None:
    words = said(trials(*HIT))
    assert "the first TTFT is 3.00 [3.00 – 3.00, 97%] times that of the next ones, of whose prompts 67% came" in words
    assert "a hit costs 1.00 [1.00 – 1.00, 97%] times a cold prompt as long as the suffix" in words


@pytest.mark.parametrize("case", [Case(64, 32, 1), Case(64, 1, 1, kind="sharers")])
def test_where_something_else_is_in_the_time_the_worth_of_a_hit_is_not_said(case: Case) -> None:
    assert "times that of the next ones" not in said(trials(*HIT, case=case), case)


def test_without_a_cache_nothing_is_a_hit() -> None:
    assert "times that of the next ones" not in said(trials(*HIT), caching=False)


def test_a_time_of_zero_is_no_divisor() -> None:
    (row,) = (row for row in document(trials(*HIT[:1], wave("warm", sample(0.0))))["rows"] if row["phase"] == "warm")
    assert row["cold_over_hit"] is None
    assert "up to 1.0 times its least" in said(trials(wave("first", sample(0.0), sample(0.2))))


def reuse(*waves: Wave) -> dict[str, Any]:
    (row,) = document(trials(*waves, count=1))["rows"]
    return {name: row[name] for name in ("cached_tokens", "hit_rate", "counters", "counted_hit_rate")}


def test_a_hit_rate_is_of_all_requests_or_of_none() -> None:
    assert reuse(wave("first", sample(cached=48), sample(cached=0)))["hit_rate"] == 0.25
    assert reuse(wave("first", sample(cached=48), sample(cached=None)))["hit_rate"] is None
    assert reuse(wave("first", sample(cached=0, prompt_tokens=0)))["hit_rate"] is None  # a target that reports none


def test_counters_are_of_all_waves_or_of_none() -> None:
    counted = wave("first", counters={"queried_tokens": 96, "hit_tokens": 24})
    assert reuse(counted, counted)["counters"] == {"queried_tokens": 192, "hit_tokens": 48}
    assert reuse(counted)["counted_hit_rate"] == 0.25
    assert reuse(counted, wave("first"))["counters"] is None
    assert reuse(wave("first", counters={"queried_tokens": 96}))["counted_hit_rate"] is None
    assert reuse(wave("first", counters={"prompt_tokens": 96, "hit_tokens": 24}))["counted_hit_rate"] == 0.25


def test_of_nothing_that_was_measured_nothing_is_known() -> None:
    failed = Wave("first", 1.0, (replace(sample(), error="gone"),), {"queried_tokens": 0, "hit_tokens": 0})
    found = reuse(failed)
    assert (found["cached_tokens"], found["hit_rate"], found["counted_hit_rate"]) == (None, None, None)


def test_targets_are_compared_trial_by_trial_and_a_trial_without_its_pair_is_left_out() -> None:
    both = trials(wave("first", sample(0.1)), count=6) + trials(wave("first", sample(0.2)), count=9, target="b")
    (entry,) = document(both)["comparisons"]  # of one output token there is no throughput
    assert (entry["ratio"]["median"], entry["ratio"]["num_values"]) == (2.0, 6)


def test_counter_examples_are_not_compared() -> None:
    case = Case(64, 1, 1, kind="exact-repeat")
    both = [trial for name in "ab" for trial in trials(wave("first"), wave("probe"), case=case, target=name)]
    assert document(both, case)["comparisons"] == []


def test_a_counter_example_must_hold_every_time() -> None:
    case = Case(64, 1, 1, kind="exact-repeat")
    made = trials(wave("probe", sample(cached=80)), case=case, count=1)
    made += trials(wave("probe", sample(cached=0)), case=case, count=1, first=1)
    (entry,) = document(made, case)["counter_examples"]
    assert entry["holds"] is False
    assert "WRONG: expected hit, cached tokens were 80, 0." in said(made, case)


REPEAT, OTHER = Case(64, 1, 1, kind="exact-repeat"), Case(64, 1, 1, kind="first-token-differs")


def probed(case: Case, cached: int | None) -> list[Trial]:
    return trials(wave("probe", sample(cached=cached)), case=case, count=2)


def about(made: Sequence[Trial]) -> list[tuple[Any, str]]:
    """(holds, what is said) of each counter-example."""
    entries = summary.counter_examples([REPEAT, OTHER], made)
    lines = findings.statements(document([]) | {"counter_examples": entries})
    return [
        (entry["holds"], "\n".join(line for line in lines if line.startswith(f"{entry['target']}, {entry['kind']}: ")))
        for entry in entries
    ]


def test_no_hit_proves_something_only_where_an_exact_repeat_hits() -> None:
    (_, repeat), (holds, other) = about(probed(REPEAT, 80) + probed(OTHER, 0))
    assert (repeat, holds, other) == (
        "a, exact-repeat: a hit, as it must be (2 times).",
        True,
        "a, first-token-differs: 0 cached tokens, as it must be (2 times).",
    )
    _, (holds, other) = about(probed(REPEAT, 0) + probed(OTHER, 0))
    assert holds and "which proves nothing, as an exact repeat had none either" in other
    assert "proves nothing" in about(probed(OTHER, 0))[0][1]


def test_a_target_that_does_not_say_what_it_found_proves_nothing() -> None:
    assert about(probed(REPEAT, None)) == [
        (None, "a, exact-repeat: unknown, as the target does not report cached tokens.")
    ]


def test_a_counter_example_that_was_not_run_is_no_finding() -> None:
    assert about([Trial(OTHER.name, 0, "a", not_run="no salts")]) == [(None, "")]


def test_only_cold_requests_that_ran_alone_must_be_cold() -> None:
    """Of a wave, the second request may well hit what the first one computes."""
    doubt = "cold requests were not cold"
    assert doubt in said(trials(wave("first", sample(cached=16))))
    assert doubt not in said(trials(wave("warm", sample(cached=16))))
    case = Case(64, 1, 8)
    assert doubt not in said(trials(wave("first", sample(cached=16)), case=case), case)


@pytest.mark.parametrize(("count", "few"), [(5, True), (6, False)])
def test_few_trials_are_said_to_be_few(count: int, few: bool) -> None:
    assert ("Fewer than 6 trials" in said(trials(wave("first"), count=count))) is few


@pytest.mark.parametrize(("count", "few"), [(19, True), (20, False)])
def test_a_percentile_of_few_values_is_said_to_be_their_largest(count: int, few: bool) -> None:
    assert ("with P95 of TTFT in 1 of 1 rows" in said(trials(wave("first"), count=count))) is few


def test_what_cannot_be_known_of_a_hit_is_not_said() -> None:
    words = said(trials(wave("first", sample(0.3)), wave("warm", sample(0.1, cached=None)), count=1))
    assert "the first TTFT is 3.00 (one trial) times that of the next ones." in words
    assert "a does not report cached tokens" in words
    assert "does not report" not in said(trials(*HIT))


def test_a_case_of_which_every_request_failed_has_no_times() -> None:
    words = said(trials(wave("first", replace(sample(), error="gone"))))
    assert "Spread" not in words and "P95" not in words


def test_targets_that_are_alone_take_no_turns() -> None:
    pair = trials(wave("first")) + trials(wave("first"), target="b")
    assert "in turn" in said(pair) and "in turn" not in said(trials(wave("first")))


@pytest.mark.parametrize(("count", "other_s", "shown"), [(6, 0.2, True), (5, 0.2, False), (6, 0.1, False)])
def test_a_difference_is_shown_by_an_interval_without_1_and_enough_pairs(
    count: int, other_s: float, shown: bool
) -> None:
    pair = trials(wave("first", sample(0.1)), count=count)
    pair += trials(wave("first", sample(other_s)), count=count, target="b")
    words = said(pair)
    assert ("b's time to first token is 2.00" in words) is shown
    assert ("b against a: no difference is shown in 1 of 1 comparisons" in words) is not shown


def test_what_ended_early_and_what_was_resumed_is_said() -> None:
    made, resumed, cut = trials(wave("first")), "Trials from an earlier start of this run: 3.", "The time budget ended"
    assert resumed in said(made, num_resumed_trials=3) and resumed[:20] not in said(made)
    assert cut in said(made, is_cut_short=True) and cut not in said(made)
    assert "Nothing was measured." in said([])
