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
    first, second = run(EXAMPLES[0]).splitlines()
    assert first.startswith("0 of ")
    hit, _, total, *_ = second.split()
    assert 0 < int(total) - int(hit) < 32


def test_the_control_plane_runs_alone() -> None:
    assert "num_cached_blocks=6" in run(EXAMPLES[1])


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
