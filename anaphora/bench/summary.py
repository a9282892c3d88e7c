"""From trials to figures: one row for each case, target and phase, and ratios between targets, trial by trial.

The unit is the trial: requests of one wave share a machine and a moment, so only trials count as independent values.
Knows no text and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from anaphora.bench.cases import Case
from anaphora.bench.intervals import median, median_interval, percentile
from anaphora.bench.measurement import Sample, Wave
from anaphora.bench.trial import Trial

_Value = Callable[[Wave], Sequence[float]]

_VALUES: Mapping[str, _Value] = {
    "ttft_s": lambda wave: [sample.ttft_s for sample in wave.completed],
    "itl_s": lambda wave: [gap for sample in wave.completed for gap in sample.token_gaps_s],
    "e2e_s": lambda wave: [sample.e2e_s for sample in wave.completed],
    "output_tokens_per_s": lambda wave: [wave.output_tokens_per_s],
}
"""Figure -> its values in one wave."""


def rows(cases: Sequence[Case], trials: Sequence[Trial], caching: Mapping[str, bool | None]) -> list[dict[str, Any]]:
    """One row for each case, target and phase that was run, in the order of the cases. caching: of each target."""
    found = []
    for case in cases:
        for target, mine in _by_target(case, trials).items():
            phases = dict.fromkeys(wave.phase for trial in mine for wave in trial.waves)
            found += [{**_row(case, target, phase, mine), "caching": caching[target]} for phase in phases]
    return found


def comparisons(cases: Sequence[Case], trials: Sequence[Trial], reference: str) -> list[dict[str, Any]]:
    """Each other target ÷ the reference, of trials with the same number: the same prompts, one after the other."""
    found = []
    for case in cases:
        if case.is_counter_example:
            continue
        by_target = _by_target(case, trials)
        base = {trial.trial: trial for trial in by_target.pop(reference, [])}
        for target, mine in by_target.items():
            pairs = [(trial, base[trial.trial]) for trial in mine if trial.trial in base]
            for phase in ("first", "warm"):
                for figure in ("ttft_s", "output_tokens_per_s"):
                    if figure == "output_tokens_per_s" and case.output_tokens == 1:
                        continue
                    ratios = _ratios([(_of(one, phase, figure), _of(other, phase, figure)) for one, other in pairs])
                    if ratios:
                        found.append(
                            {
                                "case": case.name,
                                "phase": phase,
                                "figure": figure,
                                "target": target,
                                "reference": reference,
                                "ratio": median_interval(ratios).to_json(),
                            }
                        )
    return found


def counter_examples(cases: Sequence[Case], trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """What each target's probe was expected to find and found. `holds` is None where the target does not say."""
    found = []
    for case in cases:
        if not case.is_counter_example:
            continue
        for target, mine in _by_target(case, trials).items():
            probes = [
                sample for trial in mine for wave in trial.waves if wave.phase == "probe" for sample in wave.samples
            ]
            cached = [sample.cached_tokens for sample in probes]
            holds = None
            if cached and None not in cached:
                holds = all(bool(tokens) == case.expects_hit for tokens in cached)
            found.append(
                {
                    "kind": case.kind,
                    "target": target,
                    "prompt_tokens": case.prompt_tokens,
                    "expected": "hit" if case.expects_hit else 0,
                    "cached_tokens": cached,
                    "holds": holds,
                    "not_run": next((trial.not_run for trial in mine if trial.not_run), None),
                }
            )
    return found


def requests(trials: Sequence[Trial], cases: Mapping[str, Case]) -> list[dict[str, Any]]:
    """Every measured request; what a cost model is fitted to."""
    return [
        {
            "case": trial.case,
            "trial": trial.trial,
            "target": trial.target,
            "phase": wave.phase,
            "concurrency": len(wave.samples),
            "prefix_tokens": cases[trial.case].prefix_tokens,
            "prompt_tokens": sample.prompt_tokens,
            "cached_tokens": sample.cached_tokens,
            "output_tokens": sample.output_tokens,
            "ttft_s": sample.ttft_s,
            "itl_s": sample.itl_s,
            "e2e_s": sample.e2e_s,
            "ttft_parts_s": dict(sample.parts_s),
            "is_reported": sample.is_reported,
        }
        for trial in trials
        for wave in trial.waves
        for sample in wave.completed
    ]


def _by_target(case: Case, trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    mine = sorted((trial for trial in trials if trial.case == case.name), key=lambda trial: trial.target)
    grouped = {target: list(group) for target, group in groupby(mine, key=lambda trial: trial.target)}
    order = dict.fromkeys(trial.target for trial in trials)
    return {target: sorted(grouped[target], key=lambda trial: trial.trial) for target in order if target in grouped}


def _row(case: Case, target: str, phase: str, trials: Sequence[Trial]) -> dict[str, Any]:
    mine = [[wave for wave in trial.waves if wave.phase == phase] for trial in trials]
    waves = [wave for of_trial in mine for wave in of_trial]
    samples = [sample for wave in waves for sample in wave.completed]
    row: dict[str, Any] = {
        "case": case.name,
        "kind": case.kind,
        "prefix_tokens": case.prefix_tokens,
        "suffix_tokens": case.suffix_tokens,
        "output_tokens": case.output_tokens,
        "concurrency": case.concurrency,
        "interference": case.interference,
        "target": target,
        "phase": phase,
        "num_trials": sum(1 for of_trial in mine if of_trial),
        "num_waves": len(waves),
        "num_requests": len(samples),
    }
    row |= {figure: _figure(mine, values) for figure, values in _VALUES.items()}
    row |= _reuse(samples, waves)
    row["ttft_parts_s"] = _parts(samples)
    if phase == "warm" and not case.is_counter_example:
        pairs = [(trial, trial) for trial in trials]
        row["cold_over_hit"] = _paired(pairs, "first", "warm")
        row["hit_efficiency"] = _paired(pairs, "warm", "suffix")
    return row


def _figure(trials: Sequence[Sequence[Wave]], values: _Value) -> dict[str, Any] | None:
    """None without values. Percentiles are of single values; the interval is of the trials' medians."""
    of_trials = [[value for wave in waves for value in values(wave)] for waves in trials]
    every = [value for of_trial in of_trials for value in of_trial]
    if not every:
        return None
    return {
        "num_values": len(every),
        "median": median(every),
        "p95": percentile(every, 95),
        "p99": percentile(every, 99),
        "least": min(every),
        "most": max(every),
        "interval": median_interval([median(of_trial) for of_trial in of_trials if of_trial]).to_json(),
    }


def _reuse(samples: Sequence[Sample], waves: Sequence[Wave]) -> dict[str, Any]:
    """What the replies say was cached, and beside it what the target's own counters say; None where they do not."""
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    cached = [sample.cached_tokens for sample in samples]
    known = sum(tokens or 0 for tokens in cached) if samples and None not in cached else None
    counters: dict[str, int] | None = None
    if all(wave.counters is not None for wave in waves):  # a row has a wave, or it would not be one
        counters = {}
        for wave in waves:
            for name, moved in (wave.counters or {}).items():
                counters[name] = counters.get(name, 0) + moved
    asked = (counters or {}).get("queried_tokens") or (counters or {}).get("prompt_tokens")
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": known,
        "hit_rate": None if known is None or not prompt_tokens else known / prompt_tokens,
        "counters": counters,
        "counted_hit_rate": counters["hit_tokens"] / asked if counters and asked and "hit_tokens" in counters else None,
    }


def _parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Median of each part of the time to the first token, by the target's own account."""
    names = dict.fromkeys(name for sample in samples for name in sample.parts_s)
    return {name: median([sample.parts_s.get(name, 0.0) for sample in samples]) for name in names}


def _of(trial: Trial, phase: str, figure: str) -> float | None:
    """A trial's own median."""
    values = [value for wave in trial.waves if wave.phase == phase for value in _VALUES[figure](wave)]
    return median(values) if values else None


def _paired(pairs: Sequence[tuple[Trial, Trial]], above: str, below: str) -> dict[str, Any] | None:
    """TTFT of one phase ÷ of another, trial by trial; None where they were not both measured."""
    ratios = _ratios([(_of(one, above, "ttft_s"), _of(other, below, "ttft_s")) for one, other in pairs])
    return median_interval(ratios).to_json() if ratios else None


def _ratios(pairs: Sequence[tuple[float | None, float | None]]) -> list[float]:
    return [one / other for one, other in pairs if one is not None and other is not None and other > 0]
