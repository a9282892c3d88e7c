"""Which requests a trial sends, in which order, and what becomes of a trial that cannot run."""

from __future__ import annotations

from bench_fakes import FakeTarget

from anaphora.bench.cases import Case, Sweep, all_cases, quick_sweep
from anaphora.bench.prompts import Prompts, as_text
from anaphora.bench.trial import Limits, run_trial

PROMPTS = Prompts(0, 100, 1000)
LIMITS = Limits(10_000)


def test_the_same_seed_gives_the_same_prompts_and_another_name_gives_others() -> None:
    assert PROMPTS.draw("a", 4) == Prompts(0, 100, 1000).draw("a", 4)
    assert len({PROMPTS.draw("a", 4), PROMPTS.draw("b", 4), Prompts(1, 100, 1000).draw("a", 4)}) == 3
    assert all(100 <= token < 1000 for token in PROMPTS.draw("c", 500))


def test_text_has_a_word_for_each_token() -> None:
    assert len(as_text(PROMPTS.draw("a", 50)).split(" ")) == 50


def test_the_sweep_holds_every_combination_once_and_the_rows_beside_it() -> None:
    cases = all_cases(Sweep().groups())
    assert len({case.name for case in cases}) == len(cases)
    cells = [case for case in cases if case.kind == "sweep"]
    assert len(cells) == 3 * 3 * 2 * 2
    assert {case.prefix_tokens for case in cells} == {128, 512, 2048}
    assert {case.output_tokens for case in cells} == {1, 32, 256}
    rest = [(c.kind, c.prefix_tokens, c.output_tokens, c.concurrency) for c in cases if c.kind in ("sharers", "decode")]
    assert rest == [("sharers", 2048, 64, sharers) for sharers in (1, 2, 4, 8)] + [("decode", 2048, 64, 1)]
    examples = [(case.kind, case.interference) for case in cases if case.is_counter_example]
    kinds = ("exact-repeat", "first-token-differs", "other-salt")
    assert examples == [*((kind, 0.0) for kind in kinds), ("evicted-before", 1.25)]


def test_cells_that_others_evict_come_before_the_plain_ones_in_pools_of_their_own() -> None:
    groups = Sweep().groups()
    assert len(groups) == 3 * 2 + 1
    assert not any(case.interference for case in groups[-1].cases)
    assert all(case.interference or case.is_counter_example for group in groups[:-1] for case in group.cases)
    assert [len(group.cases) for group in quick_sweep()] == [5, 5]


def test_a_trial_sends_a_cold_wave_warm_ones_and_suffixes() -> None:
    target = FakeTarget()
    target.begin(10_000)
    trial = run_trial(target, Case(64, 1, 1), 0, PROMPTS, LIMITS)
    assert [wave.phase for wave in trial.waves] == ["first", "warm", "warm", "warm", "suffix", "suffix", "suffix"]
    assert [wave.samples[0].cached_tokens for wave in trial.waves] == [0, 64, 64, 64, 0, 0, 0]
    assert [wave.counters for wave in trial.waves[:2]] == [
        {"queried_tokens": 96, "hit_tokens": 0},
        {"queried_tokens": 96, "hit_tokens": 64},
    ]
    prompts = [wave[0].token_ids for wave in target.sent]
    assert len({ids[:64] for ids in prompts[:4]}) == 1
    assert len({ids[-32:] for ids in prompts}) == 7
    assert [len(ids) for ids in prompts] == [96] * 4 + [32] * 3


def test_a_trial_begins_with_an_empty_cache() -> None:
    target = FakeTarget()
    target.begin(10_000)
    again = [run_trial(target, Case(64, 1, 1), 0, PROMPTS, LIMITS) for _ in range(2)]
    assert again[0] == again[1]


def test_requests_of_a_wave_share_the_prefix_and_nothing_else() -> None:
    target = FakeTarget()
    target.begin(10_000)
    run_trial(target, Case(64, 8, 4), 0, PROMPTS, LIMITS)
    assert [len(wave) for wave in target.sent] == [4, 4]
    sent = [request for wave in target.sent for request in wave]
    assert len({request.token_ids[:64] for request in sent}) == 1
    assert len({request.token_ids[64:] for request in sent}) == 8
    assert {request.output_tokens for request in sent} == {8}


def test_other_prompts_fill_the_pool_before_the_hit() -> None:
    target = FakeTarget()
    target.begin(256)
    trial = run_trial(target, Case(64, 1, 1, interference=1.25), 0, PROMPTS, LIMITS)
    assert [wave.phase for wave in trial.waves] == ["first", "warm"]
    assert [wave.samples[0].cached_tokens for wave in trial.waves] == [0, 0]
    others = target.sent[1:-1]
    assert sum(len(request.token_ids) for wave in others for request in wave) >= 1.25 * 256
    assert len(others) == 4  # 320 tokens in prompts of 96


def test_counter_examples_probe_what_they_name() -> None:
    found = {}
    for kind in ("exact-repeat", "first-token-differs", "other-salt"):
        target = FakeTarget()
        target.begin(10_000)
        trial = run_trial(target, Case(64, 1, 1, kind=kind), 0, PROMPTS, LIMITS)
        assert [wave.phase for wave in trial.waves] == ["prepare", "probe"]
        found[kind] = trial.waves[1].samples[0].cached_tokens
        (prepared,), (probe,) = target.sent
        assert prepared.token_ids[1:] == probe.token_ids[1:]
        assert (prepared.token_ids[0] == probe.token_ids[0]) is (kind != "first-token-differs")
        assert (prepared.cache_salt == probe.cache_salt) is (kind != "other-salt")
    assert found == {"exact-repeat": 80, "first-token-differs": 0, "other-salt": 0}


def test_what_cannot_run_says_why_and_measures_nothing() -> None:
    off = FakeTarget(caching=False)
    assert run_trial(off, Case(64, 1, 1, kind="exact-repeat"), 0, PROMPTS, LIMITS).not_run == (
        "caching is off: there is nothing to disprove"
    )
    unknown = FakeTarget()
    assert "give --pool-tokens" in (run_trial(unknown, Case(64, 1, 1, 1.0), 0, PROMPTS, LIMITS).not_run or "")
    huge = FakeTarget(fixed_pool=1_000_000)
    assert "1,000,000 tokens of other prompts" in (
        run_trial(huge, Case(64, 1, 1, 1.0), 0, PROMPTS, LIMITS).not_run or ""
    )
    saltless = FakeTarget()
    saltless.has_salt = False
    assert run_trial(saltless, Case(64, 1, 1, kind="other-salt"), 0, PROMPTS, LIMITS).not_run == (
        "the target takes no cache_salt"
    )
    assert [target.sent for target in (off, unknown, huge, saltless)] == [[], [], [], []]


def test_a_refused_request_makes_no_half_trial() -> None:
    target = FakeTarget(refuses=lambda request: "400: too long" if len(request.token_ids) > 90 else None)
    target.begin(10_000)
    trial = run_trial(target, Case(64, 1, 1), 0, PROMPTS, LIMITS)
    assert (trial.waves, trial.not_run) == ((), "a request failed: 400: too long")
