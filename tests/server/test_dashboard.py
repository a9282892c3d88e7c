"""What the Grafana dashboard and the alert rules ask for is what /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from server_world import Live

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "anaphora.json").read_text())
ALERTS = (ROOT / "docs" / "operations.md").read_text().split("```yaml")[1].split("```")[0]
EXPRESSIONS = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in DASHBOARD["panels"]}
EXPRESSIONS |= {"alerts": re.findall(r"expr: (.*)", ALERTS)}
EXPRESSIONS |= {"variables": [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]}


@pytest.fixture(scope="module")
def samples(live: Live) -> dict[str, set[str]]:
    """Sample name -> its labels, after one request."""
    live.generate([8, 9], 3)
    live.metrics()
    found: dict[str, set[str]] = {}
    for line in live.client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rsplit(" ", 1)[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return found


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_every_expression_asks_for_samples_and_labels_that_are_there(title: str, samples: dict[str, set[str]]) -> None:
    for expression in EXPRESSIONS[title]:
        names = re.findall(r"anaphora:\w+", expression)
        assert names or expression.startswith("up{")
        assert [name for name in names if name not in samples] == []
        labels = {label for group in re.findall(r"(?:by|ignoring) \((\w+)\)", expression) for label in [group]}
        labels |= set(re.findall(r'(\w+)=~?"', expression)) - {"instance", "job"}
        assert labels <= set().union(*(samples[name] for name in names)), expression


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    assert all(panel["description"] for panel in DASHBOARD["panels"])
