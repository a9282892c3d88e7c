"""The document as tables: Markdown for people, CSV for spreadsheets. Knows rows; computes nothing new."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from anaphora.bench.document import machine_line
from anaphora.bench.intervals import has_percentile

_FIGURES = ("ttft_s", "itl_s", "e2e_s", "output_tokens_per_s")
_NUMBERS = ("median", "p95", "p99", "least", "most")
_PLAIN = (
    "case",
    "kind",
    "target",
    "caching",
    "phase",
    "prefix_tokens",
    "suffix_tokens",
    "output_tokens",
    "concurrency",
    "interference",
    "num_trials",
    "num_requests",
    "prompt_tokens",
    "cached_tokens",
    "hit_rate",
    "counted_hit_rate",
)
_HEADER = (
    "case",
    "target",
    "phase",
    "n",
    "TTFT ms",
    "P95",
    "P99",
    "ITL ms",
    "P95",
    "P99",
    "E2E s",
    "P95",
    "P99",
    "tok/s",
    "hit",
    "counters",
    "hit eff.",
)


def to_csv(document: Mapping[str, Any]) -> str:
    """A line a row; times in seconds, empty where unknown; counters by name and the interval of every median."""
    counters = dict.fromkeys(name for row in document["rows"] for name in row["counters"] or {})
    header = [
        *_PLAIN,
        *(f"{figure}_{number}" for figure in _FIGURES for number in (*_NUMBERS, "low", "high", "confidence")),
        "cold_over_hit",
        "hit_efficiency",
        *(f"counted_{name}" for name in counters),
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in document["rows"]:
        cells: list[Any] = [row[name] for name in _PLAIN]
        for figure in _FIGURES:
            values = row[figure]
            interval = {} if values is None else values["interval"]
            cells += [None if values is None else values[number] for number in _NUMBERS]
            cells += [interval.get(name) for name in ("low", "high", "confidence")]
        cells += [(row.get(name) or {}).get("median") for name in ("cold_over_hit", "hit_efficiency")]
        cells += [(row["counters"] or {}).get(name) for name in counters]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return out.getvalue()


def to_markdown(document: Mapping[str, Any]) -> str:
    """A page: what was run, the words, then every figure."""
    lines = ["# anaphora bench", "", f"`{document['command']}`", "", machine_line(document), ""]
    for target in document["targets"]:
        what = target.get("url") or target.get("model")
        lines.append(f"- **{target['name']}**: {target['kind']}, {what}")
    lines += ["", "## What the data shows", "", *(f"- {statement}" for statement in document["statements"])]
    lines += ["", "## Figures", "", *_table(_HEADER, [_cells(row) for row in document["rows"]])]
    lines += ["", LEGEND]
    parts = [row for row in document["rows"] if row["ttft_parts_s"]]
    if parts:
        lines += ["", "## Parts of the time to first token, medians, ms", "", *_parts_table(parts)]
    if document["comparisons"]:
        reference = document["comparisons"][0]["reference"]
        lines += ["", f"## Divided by {reference}, pair by pair", "", *_comparison_table(document["comparisons"])]
    return "\n".join([*lines, ""])


LEGEND = (
    "Medians. n: requests. TTFT, ITL, E2E: time to first token, between tokens, to the last token. In brackets: P95 of "
    "fewer than 20 values, P99 of fewer than 100, which are the largest value. hit: cached ÷ prompt tokens, as replies "
    "say. counters: what the target's own counters moved by. hit eff.: TTFT of a hit ÷ of a cold prompt as long as the "
    "suffix."
)


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [row["case"], row["target"], row["phase"], str(row["num_requests"])]
    for figure, scale, digits in (("ttft_s", 1e3, 1), ("itl_s", 1e3, 1), ("e2e_s", 1.0, 2)):
        cells += _three(row[figure], scale, digits)
    throughput = row["output_tokens_per_s"]
    cells.append("–" if throughput is None or row["output_tokens"] == 1 else f"{throughput['median']:.1f}")
    cells.append("unknown" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}")
    cells.append(_counters(row["counters"]))
    efficiency = row.get("hit_efficiency")
    cells.append("–" if efficiency is None else f"{efficiency['median']:.2f}")
    return cells


def _three(figure: Mapping[str, Any] | None, scale: float, digits: int) -> list[str]:
    if figure is None:
        return ["–"] * 3
    cells = [f"{figure['median'] * scale:.{digits}f}"]
    for share in (95, 99):
        text = f"{figure[f'p{share}'] * scale:.{digits}f}"
        cells.append(text if has_percentile(figure["num_values"], share) else f"({text})")
    return cells


def _counters(counters: Mapping[str, int] | None) -> str:
    """The ones that moved, in short."""
    if counters is None:
        return "none"
    moved = [f"{name.replace('_tokens', '').replace('_', ' ')} {value:,}" for name, value in counters.items() if value]
    return ", ".join(moved) or "nothing moved"


def _parts_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["ttft_parts_s"]))
    body = [
        [
            row["case"],
            row["target"],
            row["phase"],
            *(f"{row['ttft_parts_s'].get(name, 0.0) * 1e3:.2f}" for name in names),
        ]
        for row in rows
    ]
    return _table(["case", "target", "phase", *names], body)


def _comparison_table(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    body = []
    for entry in comparisons:
        ratio = entry["ratio"]
        figure = "TTFT" if entry["figure"] == "ttft_s" else "tok/s"
        interval = f"{ratio['low']:.2f} – {ratio['high']:.2f}"
        body.append(
            [
                entry["case"],
                entry["phase"],
                entry["target"],
                figure,
                f"{ratio['median']:.2f}",
                interval,
                f"{ratio['confidence']:.0%}",
                str(ratio["num_values"]),
            ]
        )
    return _table(["case", "phase", "target", "figure", "ratio", "interval", "confidence", "pairs"], body)


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [_line(header), _line(["---"] * len(header)), *(_line(cells) for cells in body)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
