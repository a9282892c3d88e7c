"""The whole result as plain data: what was run on what, the rows, the ratios, the words, and every request."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from anaphora.bench.cases import all_cases
from anaphora.bench.findings import statements
from anaphora.bench.journal import Journal
from anaphora.bench.measurement import Target
from anaphora.bench.runner import Plan
from anaphora.bench.summary import comparisons, counter_examples, requests, rows

FORMAT = 1
_PACKAGES = ("anaphora", "torch", "transformers", "numpy", "numba")


def make_document(
    plan: Plan, targets: Sequence[Target], journal: Journal, *, command: str, num_resumed: int
) -> dict[str, Any]:
    """JSON-ready. command: how the run can be had again. The first target is what the others are compared with."""
    cases = all_cases(plan.groups)
    trials = journal.trials
    reasons = {(trial.case, trial.target): trial.not_run for trial in trials if trial.not_run is not None}
    document: dict[str, Any] = {
        "format": FORMAT,
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("OMP_", "MKL_"))},
        "plan": plan.to_json(),
        "targets": [{"name": target.name, "caching": target.caching, **target.describe()} for target in targets],
        "num_trials": len(trials),
        "num_resumed_trials": num_resumed,
        "is_cut_short": len(trials) < plan.num_trials(targets),
        "not_run": [{"case": case, "target": target, "reason": reason} for (case, target), reason in reasons.items()],
        "rows": rows(cases, trials, {target.name: target.caching for target in targets}),
        "comparisons": comparisons(cases, trials, targets[0].name),
        "counter_examples": counter_examples(cases, trials),
    }
    document["statements"] = statements(document)
    document["requests"] = requests(trials, {case.name: case for case in cases})
    return document


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "num_cores": psutil.cpu_count(logical=False),
        "num_logical_cores": psutil.cpu_count(),
        "num_usable_cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else None,
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(psutil.getloadavg()),
        "system": platform.system(),
        "release": platform.release(),
    }


def versions() -> dict[str, str]:
    """Of Python, and of the packages that are here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed has no version
    return found


def _cpu_name() -> str:
    """Linux says it in /proc; elsewhere Python may know."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def machine_line(document: Mapping[str, Any]) -> str:
    """One line for people: the machine and the versions."""
    here, packages = document["machine"], document["versions"]
    memory = here["memory_bytes"] / 2**30
    named = ", ".join(f"{name} {version}" for name, version in packages.items())
    return f"{here['cpu']}, {here['num_logical_cores']} logical cores, {memory:.0f} GiB, {here['system']}; {named}"
