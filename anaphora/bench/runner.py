"""Runs a plan: rounds over the cases, and within a case every target in turn, so that drift hits all of them alike.

Knows targets by their protocol, a journal and a clock; must not know what the figures mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anaphora.bench.cases import PoolGroup, all_cases
from anaphora.bench.journal import Journal
from anaphora.bench.measurement import Target
from anaphora.bench.prompts import Prompts
from anaphora.bench.trial import Limits, Trial, run_trial, warm_up
from anaphora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. num_rounds: trials of each case on each target. Raises ConfigError."""

    groups: tuple[PoolGroup, ...]
    num_rounds: int
    prompts: Prompts
    limits: Limits

    def __post_init__(self) -> None:
        if self.num_rounds < 1:
            raise ConfigError(f"repeats must be an integer >= 1, got {self.num_rounds}")

    def to_json(self) -> dict[str, Any]:
        return {
            "cases": [case.name for case in all_cases(self.groups)],
            "num_rounds": self.num_rounds,
            "prompts": asdict(self.prompts),
            "limits": asdict(self.limits),
        }

    def identity(self, targets: Sequence[Target]) -> dict[str, Any]:
        """Everything that makes two runs the same one: trials of another identity must not be mixed with these."""
        return {**self.to_json(), "targets": [{"name": target.name, **target.describe()} for target in targets]}

    def num_trials(self, targets: Sequence[Target]) -> int:
        return len(all_cases(self.groups)) * self.num_rounds * len(targets)


@dataclass(frozen=True, slots=True)
class Budget:
    """Every case runs once. Further rounds begin only if they look like ending by `until_s`, in the clock's seconds."""

    until_s: float | None = None
    clock: Callable[[], float] = time.perf_counter

    def allows(self, last_round_s: float, num_groups_left: int) -> bool:
        """Whether another round fits into this group's share of what is left."""
        if self.until_s is None:
            return True
        return last_round_s <= (self.until_s - self.clock()) / num_groups_left


def run_plan(
    plan: Plan,
    targets: Sequence[Target],
    journal: Journal,
    *,
    budget: Budget = Budget(),
    progress: Callable[[str, int], None] = lambda what, trials: None,
) -> None:
    """Fill the journal. progress: what runs now, and trials done or left out since the last call. Raises BenchError."""
    done = journal.done
    for place, group in enumerate(plan.groups):
        keys = [
            (case.name, trial, target.name)
            for case in group.cases
            for trial in range(plan.num_rounds)
            for target in targets
        ]
        if all(key in done for key in keys):
            progress("resumed", len(keys))
            continue
        for target in targets:
            progress(f"{target.name}: getting ready", 0)
            target.begin(group.pool_tokens)
            warm_up(target, group.cases, plan.prompts)
        left = len(keys)
        for index in range(plan.num_rounds):
            begin_s = budget.clock()
            for trial in _round(plan, group, targets, index, done, progress):
                journal.add(trial)
            left -= len(group.cases) * len(targets)
            if not budget.allows(budget.clock() - begin_s, len(plan.groups) - place):
                break
        progress("out of time", left)


def _round(
    plan: Plan,
    group: PoolGroup,
    targets: Sequence[Target],
    index: int,
    done: set[tuple[str, int, str]],
    progress: Callable[[str, int], None],
) -> Iterator[Trial]:
    for place, case in enumerate(group.cases):
        first = (index + place) % len(targets)  # whoever comes first now comes last another time
        for target in (*targets[first:], *targets[:first]):
            progress(f"{target.name}: {case.name}", 0)
            if (case.name, index, target.name) not in done:
                yield run_trial(target, case, index, plan.prompts, plan.limits)
            progress(f"{target.name}: {case.name}", 1)
