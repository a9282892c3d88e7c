"""Rounds, turns, budgets, and a killed run that goes on; then what the whole document says."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeTarget

from anaphora.bench.cases import Case, PoolGroup
from anaphora.bench.document import make_document
from anaphora.bench.journal import Journal
from anaphora.bench.plot import write_plots
from anaphora.bench.prompts import Prompts
from anaphora.bench.runner import Budget, Plan, run_plan
from anaphora.bench.tables import to_csv, to_markdown
from anaphora.bench.trial import Limits
from anaphora.errors import BenchError

GROUPS = (
    PoolGroup((Case(64, 1, 1, 1.25), Case(64, 1, 1, kind="exact-repeat"), Case(64, 1, 1, kind="first-token-differs"))),
    PoolGroup((Case(64, 1, 1), Case(128, 1, 1), Case(64, 4, 2, kind="sharers"))),
)


def make_plan(num_rounds: int = 6, groups: Sequence[PoolGroup] = GROUPS) -> Plan:
    return Plan(tuple(groups), num_rounds, Prompts(0, 100, 1000), Limits())


def document_of(*targets: FakeTarget, num_rounds: int = 6, groups: Sequence[PoolGroup] = GROUPS) -> dict[str, Any]:
    plan, journal = make_plan(num_rounds, groups), Journal(None, {})
    run_plan(plan, targets, journal)
    return make_document(plan, targets, journal, command="anaphora bench", num_resumed=0)


def test_targets_take_turns_at_coming_first() -> None:
    journal, targets = Journal(None, {}), [FakeTarget("a"), FakeTarget("b")]
    run_plan(make_plan(2, [PoolGroup((Case(64, 1, 1), Case(128, 1, 1)))]), targets, journal)
    order = [(trial.trial, trial.case.split()[1], trial.target) for trial in journal.trials]
    assert order == [
        (0, "64+32/1", "a"),
        (0, "64+32/1", "b"),
        (0, "128+32/1", "b"),
        (0, "128+32/1", "a"),
        (1, "64+32/1", "b"),
        (1, "64+32/1", "a"),
        (1, "128+32/1", "a"),
        (1, "128+32/1", "b"),
    ]


def test_targets_get_the_same_prompts_and_every_trial_gets_others() -> None:
    one, two = FakeTarget("a"), FakeTarget("b")
    run_plan(make_plan(2, [PoolGroup((Case(64, 1, 1),))]), [one, two], Journal(None, {}))
    assert one.sent == two.sent
    prompts = [request.token_ids for wave in one.sent[3:] for request in wave]  # after the warm-up
    assert len(prompts) == 2 * 7
    assert len(set(prompts)) == len(prompts)


def test_every_group_gets_fresh_targets_with_its_own_pool() -> None:
    target = FakeTarget()
    run_plan(make_plan(1), [target], Journal(None, {}))
    assert target.begun == [group.pool_tokens for group in GROUPS]


def test_a_budget_ends_rounds_but_never_the_first() -> None:
    ticks = itertools.count()
    budget = Budget(until_s=0.0, clock=lambda: float(next(ticks)))
    plan, journal, target = make_plan(5), Journal(None, {}), FakeTarget()
    run_plan(plan, [target], journal, budget=budget)
    assert {trial.trial for trial in journal.trials} == {0}
    assert len(journal.trials) == 6
    document = make_document(plan, [target], journal, command="", num_resumed=0)
    assert document["is_cut_short"] is True
    assert "The time budget ended the run before all rounds were done." in document["statements"]


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    state, plan = tmp_path / "state.jsonl", make_plan(2)
    with pytest.raises(BenchError, match="gone"):
        run_plan(plan, [FakeTarget(dies_after=17)], Journal(state, plan.to_json()))
    first = Journal(state, plan.to_json())
    assert 0 < len(first.trials) < 12
    with state.open("a") as file:
        file.write('{"case": "cut sho')  # killed while it wrote

    resumed = Journal(state, plan.to_json())
    assert resumed.trials == first.trials
    target = FakeTarget()
    advanced: list[int] = []
    run_plan(plan, [target], resumed, progress=lambda what, trials: advanced.append(trials))
    assert len(resumed.trials) == 12
    assert sum(advanced) == 12

    whole = Journal(None, {})
    run_plan(plan, [FakeTarget()], whole)
    assert resumed.trials == whole.trials
    assert Journal(state, plan.to_json()).trials == whole.trials
    done = FakeTarget()
    run_plan(plan, [done], resumed)
    assert (done.begun, done.sent) == ([], [])


def test_a_state_file_of_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    Journal(state, {"seed": 1})
    with pytest.raises(BenchError, match="other options: give --fresh"):
        Journal(state, {"seed": 2})
    other = tmp_path / "other.txt"
    other.write_text("hello\n")
    with pytest.raises(BenchError, match="no state file"):
        Journal(other, {"seed": 1})
    assert other.read_text() == "hello\n"


def test_a_row_holds_medians_intervals_hits_and_counters() -> None:
    document = document_of(FakeTarget())
    rows = {(row["case"], row["phase"]): row for row in document["rows"]}
    cold, hit = rows["sweep 64+32/1 x1", "first"], rows["sweep 64+32/1 x1", "warm"]
    assert cold["ttft_s"]["median"] == pytest.approx(0.096)
    assert hit["ttft_s"]["median"] == pytest.approx(0.032)
    assert (cold["num_requests"], hit["num_requests"], hit["num_trials"]) == (6, 18, 6)
    assert hit["ttft_s"]["interval"]["num_values"] == 6
    assert hit["ttft_s"]["interval"]["confidence"] == 0.96875
    assert (hit["cached_tokens"], hit["hit_rate"], hit["counted_hit_rate"]) == (18 * 64, 64 / 96, 64 / 96)
    assert hit["counters"] == {"queried_tokens": 18 * 96, "hit_tokens": 18 * 64}
    assert hit["cold_over_hit"]["median"] == pytest.approx(3.0)
    assert hit["hit_efficiency"]["median"] == pytest.approx(1.0)
    assert rows["sweep 64+32/1 x1 other 1.25", "warm"]["hit_rate"] == 0.0
    shared = rows["sharers 64+32/4 x2", "warm"]
    assert shared["itl_s"]["median"] == pytest.approx(0.01)
    assert shared["output_tokens_per_s"]["median"] == pytest.approx(8 / (0.032 + 0.03))
    assert document["is_cut_short"] is False


def test_every_request_is_kept_for_a_cost_model() -> None:
    requests = document_of(FakeTarget(), num_rounds=1)["requests"]
    shared = next(request for request in requests if request["case"].startswith("sharers"))
    assert {name: shared[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens", "concurrency")} == {
        "prompt_tokens": 96,
        "cached_tokens": 0,
        "output_tokens": 4,
        "concurrency": 2,
    }
    assert {"case", "target", "ttft_s", "e2e_s"} <= shared.keys()


def test_a_target_that_is_twice_as_slow_is_said_to_be_and_one_that_is_not_is_not() -> None:
    document = document_of(FakeTarget("a"), FakeTarget("b", slow=2.0), FakeTarget("c"))
    words = "\n".join(document["statements"])
    assert "sweep 64+32/1 x1, warm: b's time to first token is 2.00 [2.00 – 2.00, 97%] times a's" in words
    assert "sharers 64+32/4 x2, first: b's output throughput is 0.50 [0.50 – 0.50, 97%] times a's" in words
    assert "c against a: no difference is shown in 10 of 10 comparisons" in words
    few = document_of(FakeTarget("a"), FakeTarget("b", slow=2.0), num_rounds=5)
    assert "b against a: no difference is shown in 10 of 10 comparisons" in "\n".join(few["statements"])


def test_counter_examples_hold_only_beside_a_repeat_that_hits() -> None:
    good = document_of(FakeTarget(), num_rounds=2)
    held = {entry["kind"]: (entry["holds"], entry["cached_tokens"]) for entry in good["counter_examples"]}
    assert held == {"exact-repeat": (True, [80, 80]), "first-token-differs": (True, [0, 0])}
    assert "fake, first-token-differs: 0 cached tokens, as it must be (2 times)." in good["statements"]

    blind = document_of(FakeTarget(caching=None, fixed_pool=16), num_rounds=2)
    assert "fake, exact-repeat: WRONG: expected hit, cached tokens were 0, 0." in blind["statements"]
    assert (
        "fake, first-token-differs: 0 cached tokens, which proves nothing, as an exact repeat had none either."
        in blind["statements"]
    )
    silent = document_of(FakeTarget(knows=False), num_rounds=2)
    assert "fake, exact-repeat: unknown, as the target does not report cached tokens." in silent["statements"]
    assert "fake does not report cached tokens: that a request hit follows from its time alone." in silent["statements"]


def test_a_cold_request_that_was_not_cold_is_said() -> None:
    class Stale(FakeTarget):
        def reset(self) -> bool:
            return False

    plan, journal, target = make_plan(1, [PoolGroup((Case(64, 1, 1),))]), Journal(None, {}), Stale()
    for _ in range(2):  # the same prompts in a cache that nothing empties
        journal = Journal(None, {})
        run_plan(plan, [target], journal)
    words = make_document(plan, [target], journal, command="", num_resumed=0)["statements"]
    assert any("cold requests were not cold (80 cached tokens)" in statement for statement in words)


def test_what_was_not_run_is_listed_with_its_reason() -> None:
    off = FakeTarget("off", caching=False)
    document = document_of(FakeTarget("on"), off, num_rounds=1)
    assert {entry["target"] for entry in document["not_run"]} == {"off"}
    line = "Not run on off: exact-repeat 64+32/1 x1, first-token-differs 64+32/1 x1: caching is off: "
    assert any(statement.startswith(line) for statement in document["statements"])


def test_the_tables_hold_what_the_document_holds() -> None:
    document = document_of(FakeTarget("a"), FakeTarget("b", slow=2.0, knows=False))
    lines = list(csv.DictReader(io.StringIO(to_csv(document))))
    assert len(lines) == len(document["rows"])
    hit = next(
        line
        for line in lines
        if (line["case"], line["target"]) == ("sweep 64+32/1 x1", "a") and line["phase"] == "warm"
    )
    assert float(hit["ttft_s_median"]) == pytest.approx(0.032)
    assert (hit["cached_tokens"], hit["counted_hit_tokens"], hit["itl_s_median"]) == ("1152", "1152", "")
    page = to_markdown(document)
    assert "| sweep 64+32/1 x1 | a | warm | 18 | 32.0 | (32.0) | (32.0) | – | – | – | 0.03 |" in page
    assert "| unknown |" in page
    assert "| sweep 64+32/1 x1 | warm | b | TTFT | 2.00 | 2.00 – 2.00 | 97% | 6 |" in page
    assert json.loads(json.dumps(document)) == document


def test_three_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_plots(document_of(FakeTarget(), num_rounds=1), tmp_path / "plots")
    assert [path.name for path in written] == [
        "ttft_by_prefix.png",
        "hit_rate_under_interference.png",
        "throughput_by_sharers.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
