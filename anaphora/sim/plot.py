"""Hit rate against capacity as a picture. Knows the sweep's document and matplotlib, an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError


def check_plotting() -> None:
    """Raises ConfigError where matplotlib is missing: better before a long replay than after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def write_plot(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a trace, one line a policy and block size, a dashed line for the unbounded pool. Raises ConfigError."""
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2 * len(documents)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, document in enumerate(documents, start=1):
        axes = figure.add_subplot(len(documents), 1, place)
        for sizes in document["block_sizes"]:
            size, bound = sizes["block_size"], 100 * sizes["unbounded_hit_rate"]
            axes.axhline(bound, linestyle="--", color="grey", linewidth=1, label=f"unbounded, block {size}")
            for policy in dict.fromkeys(point["policy"] for point in sizes["points"]):
                points = [point for point in sizes["points"] if point["policy"] == policy]
                capacity = [point["num_blocks"] * size for point in points]
                axes.plot(capacity, [100 * p["hit_rate"] for p in points], marker="o", label=f"{policy}, block {size}")
        axes.set(title=Path(document["trace"]).name, xlabel="capacity, tokens", ylabel="hit rate, %", xscale="log")
        axes.set_ylim(bottom=0)
        axes.legend()
    try:
        # Without these the file would carry the library's version.
        figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error}") from error
