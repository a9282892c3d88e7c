"""One case, once, on one target: which requests are sent in which order.

    first ──▶ (others, untimed) ──▶ warm, ... ──▶ suffix       one wave each, between two readings of the counters

`first`: nothing of the prompts is cached. `warm`: the same prefix, other suffixes. `suffix`: prompts as long as a
suffix alone, never seen. Of a counter-example: `prepare`, then `probe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from anaphora.bench.cases import Case
from anaphora.bench.measurement import BenchRequest, Sample, Target, Wave
from anaphora.bench.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Limits:
    """max_interference_tokens: tokens of other prompts that one trial may send; more is not run, and said."""

    max_interference_tokens: int = 32_768


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it: waves, or the reason why it was not run."""

    case: str
    trial: int
    target: str
    waves: tuple[Wave, ...] = field(default=())
    not_run: str | None = None


def run_trial(target: Target, case: Case, trial: int, prompts: Prompts, limits: Limits) -> Trial:
    """Raises BenchError if the target is gone."""
    if case.is_counter_example and target.caching is False:
        return Trial(case.name, trial, target.name, not_run="caching is off: there is nothing to disprove")
    if case.kind == "other-salt" and not target.has_salt:
        return Trial(case.name, trial, target.name, not_run="the target takes no cache_salt")
    num_other_tokens = 0
    if case.interference:
        if target.pool_tokens is None:
            reason = "the size of the target's cache is unknown: give --pool-tokens"
            return Trial(case.name, trial, target.name, not_run=reason)
        num_other_tokens = int(case.interference * target.pool_tokens)
        if num_other_tokens > limits.max_interference_tokens:
            reason = (
                f"a cache of {target.pool_tokens:,} tokens takes {num_other_tokens:,} tokens of other prompts to fill: "
                "start the target with a smaller one, or raise --max-interference-tokens"
            )
            return Trial(case.name, trial, target.name, not_run=reason)
    target.reset()
    draw = _Draw(prompts, f"{case.name}:{trial}")
    send = _counter_example if case.is_counter_example else _cell
    try:
        waves = send(target, case, draw, num_other_tokens)
    except _RequestFailedError as failure:
        return Trial(case.name, trial, target.name, not_run=f"a request failed: {failure}")
    return Trial(case.name, trial, target.name, tuple(waves))


def warm_up(target: Target, cases: Sequence[Case], prompts: Prompts) -> None:
    """Untimed: as many requests at once as will come, and the longest prompt. Leaves an empty cache where it can."""
    at_once = max(case.concurrency for case in cases)
    longest = max(case.prompt_tokens for case in cases)
    short = [BenchRequest(prompts.draw(f"warm-up:{index}", min(64, longest)), 8) for index in range(at_once)]
    target.run(short[:1])
    target.run(short)
    target.run([BenchRequest(prompts.draw("warm-up:long", longest), 2)])
    target.reset()


@dataclass(frozen=True, slots=True)
class _Draw:
    """The tokens of one trial, by what they are for."""

    prompts: Prompts
    name: str

    def __call__(self, what: str, count: int) -> tuple[int, ...]:
        return self.prompts.draw(f"{self.name}:{what}", count)


def _cell(target: Target, case: Case, draw: _Draw, num_other_tokens: int) -> list[Wave]:
    prefix = draw("prefix", case.prefix_tokens)

    def wave(phase: str, beginning: tuple[int, ...], output_tokens: int) -> Wave:
        return _measure(
            target,
            phase.split(":")[0],
            [
                BenchRequest(beginning + draw(f"{phase}:{index}", case.suffix_tokens), output_tokens)
                for index in range(case.concurrency)
            ],
        )

    waves = [wave("first", prefix, case.output_tokens)]
    _interfere(target, case, draw, num_other_tokens)
    # Without a cache every wave is cold: one more is enough to see that.
    num_warm = 1 if target.caching is False else case.num_warm_waves
    waves += [wave(f"warm:{index}", prefix, case.output_tokens) for index in range(num_warm)]
    if case.measures_suffix and target.caching is not False:
        waves += [wave(f"suffix:{index}", (), case.output_tokens) for index in range(num_warm)]
    return waves


def _counter_example(target: Target, case: Case, draw: _Draw, num_other_tokens: int) -> list[Wave]:
    prompt = probe = draw("prompt", case.prompt_tokens)
    salts = ("one", "two") if case.kind == "other-salt" else (None, None)
    if case.kind == "first-token-differs":
        probe = (draw.prompts.other(prompt[0]), *prompt[1:])
    waves = [_measure(target, "prepare", [BenchRequest(prompt, case.output_tokens, salts[0])])]
    _interfere(target, case, draw, num_other_tokens)
    return [*waves, _measure(target, "probe", [BenchRequest(probe, case.output_tokens, salts[1])])]


def _interfere(target: Target, case: Case, draw: _Draw, num_tokens: int) -> None:
    """Other prompts of the same length, as many at once as the case has, until they add up to num_tokens."""
    others = [
        BenchRequest(draw(f"other:{index}", case.prompt_tokens), 1)
        for index in range(-(-num_tokens // case.prompt_tokens))
    ]
    for start in range(0, len(others), case.concurrency):
        _run(target, others[start : start + case.concurrency])


def _measure(target: Target, phase: str, requests: list[BenchRequest]) -> Wave:
    before = target.counters()
    duration_s, samples = _run(target, requests)
    after = target.counters()
    moved = None
    if before is not None and after is not None:
        moved = {name: after[name] - before[name] for name in after if name in before}
    return Wave(phase, duration_s, tuple(samples), moved)


def _run(target: Target, requests: list[BenchRequest]) -> tuple[float, list[Sample]]:
    duration_s, samples = target.run(requests)
    for sample in samples:
        if sample.error is not None:
            raise _RequestFailedError(sample.error)
    return duration_s, samples


class _RequestFailedError(Exception):
    """Half a trial is no trial: what was measured of it is left out, and the reason is kept."""
