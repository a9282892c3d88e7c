"""`make` says what it is about to do, and pip's own lines do not bury it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

LINES = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8").splitlines()


def test_pip_is_quiet() -> None:
    installs = [line for line in LINES if "pip install" in line]
    assert len(installs) == 3
    assert [line for line in installs if "--quiet" not in line] == []


def test_what_takes_long_is_announced() -> None:
    long = ("-m venv", "-c constraints.txt", "$(PYTEST)", "anaphora demo", "ruff check")
    before = [(command, first) for first, line in pairwise(LINES) for command in long if command in line]
    assert {command for command, _ in before} == set(long)
    assert [line for _, line in before if not line.startswith("\t@echo ")] == []
