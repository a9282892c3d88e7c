"""The table of `anaphora simulate`. Knows the sweep's document; must not know how it came about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer


def show(document: dict[str, Any]) -> None:
    """Print the results of one trace."""
    skipped = document["num_skipped_lines"]
    lines = [
        f"{document['trace']}: {document['num_requests']:,} requests, {document['num_input_tokens']:,} prompt tokens"
        + (f", {skipped:,} broken lines left out" if skipped else "")
    ]
    if document["recorded_hit_rate"] is not None:
        lines.append(f"the engine that recorded it had a hit rate of {document['recorded_hit_rate']:.2%}")
    timed = document["mode"] == "timed"
    if timed:
        lines += _cost(document["cost_model"], document["cost_fit"])
    what = f"{document['mode']}{', with outputs' if document['with_outputs'] and not timed else ''}"
    header = ("policy", "blocks", "tokens", "hit rate", "saved", "computed", "evicted", "refused")
    for sizes in document["block_sizes"]:
        size, distinct = sizes["block_size"], sizes["num_distinct_blocks"]
        rows = [header + (("TTFT p50 s", "p99 s", "queue s", "wait s", "compute s") if timed else ())]
        rows += [(*_row(point, size), *(_times(point) if timed else ())) for point in sizes["points"]]
        rows.append(("unbounded", f"{distinct:,}", f"{distinct * size:,}", f"{sizes['unbounded_hit_rate']:.2%}"))
        lines += ["", f"{what}, block size {size}{'' if sizes['exact'] else ' (hits are a lower bound)'}"]
        lines += _aligned(rows)
    # Of no terminal's width: the same input gives the same bytes everywhere.
    typer.echo("\n".join([*lines, ""]))


def _cost(cost: dict[str, float], fit: dict[str, Any] | None) -> Iterator[str]:
    """The model, and what it leaves unexplained of the measurements that it is fitted to."""
    overhead_ms, token_us, pair_ns = cost["overhead_s"] * 1e3, cost["token_s"] * 1e6, cost["attention_s"] * 1e9
    yield f"a step takes {overhead_ms:.4g} ms + {token_us:.4g} us a token + {pair_ns:.4g} ns a (token, position) pair"
    if fit is not None:
        residual_ms, largest_ms = fit["residual_s"] * 1e3, fit["largest_residual_s"] * 1e3
        yield (
            f"fitted to {fit['num_requests']:,} requests: off by {residual_ms:.3g} ms in the root mean square, "
            f"by {largest_ms:.3g} ms at most"
        )


def _row(point: dict[str, Any], block_size: int) -> Iterator[str]:
    yield point["policy"]
    yield f"{point['num_blocks']:,}"
    yield f"{point['num_blocks'] * block_size:,}"
    yield f"{point['hit_rate']:.2%}"
    for count in ("num_saved_tokens", "num_computed_tokens", "num_evicted_blocks", "num_refused_requests"):
        yield f"{point[count]:,}"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([row[0].ljust(widths[0]), *cells[1:]])


def _times(point: dict[str, Any]) -> Iterator[str]:
    """Median and 99th percentile of the time to first token; the mean of each of its parts."""
    ttft = point["ttft_s"]
    for percentile in ("p50", "p99"):
        yield f"{ttft[percentile]:z.2f}" if ttft else "-"
    for part in ("queue_s", "wait_s", "compute_s"):
        yield f"{point[part]['mean']:z.2f}" if point[part] else "-"
