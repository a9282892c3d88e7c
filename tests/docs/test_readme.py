"""The README's examples run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.models
def test_the_first_example_reuses_the_system_prompt() -> None:
    first, second = re.findall(r"^(\d+) of (\d+) prompt tokens", run(EXAMPLES[0]), re.MULTILINE)
    assert first[0] == "0"
    assert 0 < int(second[1]) - int(second[0]) < 32


@pytest.mark.models
def test_the_step_engine_runs() -> None:
    *_, last = run(EXAMPLES[1]).splitlines()
    assert last.startswith("a ")
    assert last.endswith(" True")


def test_the_control_plane_runs_alone() -> None:
    assert run(EXAMPLES[2]) == "a found 0 of 102 tokens\nb found 96 of 102 tokens\n"


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
