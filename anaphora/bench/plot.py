"""Three pictures of a document. Knows rows and matplotlib, an optional extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError

_Rows = Sequence[Mapping[str, Any]]


def check_plotting() -> None:
    """Raises ConfigError where matplotlib is missing: better before a long run than after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def write_plots(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """PNG files: TTFT against prefix length, hit rate under interference, throughput against sharers.

    Returns those that were written: a picture without data is left out. Raises ConfigError.
    """
    check_plotting()
    drawings: list[tuple[str, Callable[[Any, _Rows], bool]]] = [
        ("ttft_by_prefix", _ttft),
        ("hit_rate_under_interference", _hit_rate),
        ("throughput_by_sharers", _throughput),
    ]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in drawings:
            figure = Figure(figsize=(7.2, 4.4), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            if draw(axes, document["rows"]):
                axes.legend(fontsize="small")
                figure.savefig(folder / f"{name}.png", dpi=120, metadata={"Software": None})
                written.append(folder / f"{name}.png")
    except OSError as error:
        raise ConfigError(f"cannot write the plots to {folder}: {error}; give another --plot") from error
    return written


def _ttft(axes: Any, rows: _Rows) -> bool:
    chosen = [
        row
        for row in rows
        if row["kind"] == "sweep" and row["output_tokens"] == 1 and row["concurrency"] == 1 and not row["interference"]
    ]
    for target, phase in dict.fromkeys((row["target"], row["phase"]) for row in chosen if row["phase"] != "suffix"):
        mine = sorted(
            (row for row in chosen if (row["target"], row["phase"]) == (target, phase)),
            key=lambda r: r["prefix_tokens"],
        )
        middle = [1e3 * row["ttft_s"]["median"] for row in mine]
        below = [m - 1e3 * row["ttft_s"]["interval"]["low"] for m, row in zip(middle, mine, strict=True)]
        above = [1e3 * row["ttft_s"]["interval"]["high"] - m for m, row in zip(middle, mine, strict=True)]
        error = [[max(0.0, value) for value in side] for side in (below, above)]
        prefixes = [row["prefix_tokens"] for row in mine]
        axes.errorbar(prefixes, middle, error, marker="o", capsize=3, label=f"{target}, {phase}")
    axes.set(xlabel="shared prefix, tokens", ylabel="time to first token, ms", xscale="log", yscale="log")
    axes.set_title("Time to first token, one request at a time")
    return bool(chosen)


def _hit_rate(axes: Any, rows: _Rows) -> bool:
    chosen = [
        row
        for row in rows
        if row["kind"] == "sweep"
        and row["phase"] == "warm"
        and row["hit_rate"] is not None
        and row["output_tokens"] == 1
    ]
    keys = dict.fromkeys((row["target"], row["prefix_tokens"], row["concurrency"]) for row in chosen)
    for target, prefix, at_once in keys:
        mine = sorted(
            (r for r in chosen if (r["target"], r["prefix_tokens"], r["concurrency"]) == (target, prefix, at_once)),
            key=lambda r: r["interference"],
        )
        label = f"{target}, {prefix} shared, {at_once} at once"
        axes.plot([r["interference"] for r in mine], [100 * r["hit_rate"] for r in mine], marker="o", label=label)
    axes.set(xlabel="other prompts' tokens before the hit ÷ pool", ylabel="cached ÷ prompt tokens, %", ylim=(-3, 103))
    axes.set_title("Hit rate under interference")
    return any(row["interference"] for row in chosen)


def _throughput(axes: Any, rows: _Rows) -> bool:
    chosen = [row for row in rows if row["kind"] == "sharers"]
    for target, phase in dict.fromkeys((row["target"], row["phase"]) for row in chosen):
        mine = sorted(
            (r for r in chosen if (r["target"], r["phase"]) == (target, phase)), key=lambda row: row["concurrency"]
        )
        values = [row["output_tokens_per_s"]["median"] for row in mine]
        axes.plot([row["concurrency"] for row in mine], values, marker="o", label=f"{target}, {phase}")
    axes.set(xlabel="requests at once that share a prefix", ylabel="output tokens a second")
    axes.set_ylim(bottom=0)
    axes.set_title("Throughput against sharers")
    return bool(chosen)
