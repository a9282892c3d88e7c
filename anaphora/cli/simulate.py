"""`anaphora simulate`: what a cache of a given size would reuse on recorded traffic, before it is bought."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anaphora.cli import console
from anaphora.cli.options import JsonFlag
from anaphora.core.eviction import POLICIES
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_POLICIES = ", ".join(POLICIES)


def _timed(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel="Timed mode")


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Files in Mooncake's JSONL format.")],
    blocks: Annotated[
        str | None, typer.Option(metavar="N,...", help="Pool sizes; without it, up to the trace's working set.")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(metavar="B,...", help="Token positions in a block; without it, the trace's own.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="P,...", help=f"Of {_POLICIES}; or `all` of them, or `offline` (the bound).")
    ] = "lru",
    mode: Annotated[
        str, typer.Option(help="`sequential`: one request after the other. `timed`: as they arrive, with a cost model.")
    ] = "sequential",
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Sequential: outputs take room too while they run.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave broken lines out and count them.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help=r"Write hit rate against capacity here (needs anaphora\[plot]).")
    ] = None,
    as_json: JsonFlag = False,
    overhead_ms: Annotated[float, _timed("Of every step.")] = 5.0,
    token_us: Annotated[float, _timed("Of every scheduled token.")] = 40.0,
    attention_ns: Annotated[float, _timed("Of every pair of a scheduled token and a position it attends to.")] = 1.5,
    max_num_batched_tokens: Annotated[int, _timed("Most tokens scheduled in one step.")] = 8192,
    max_num_seqs: Annotated[int, _timed("Most requests running at once.")] = 256,
    arrival_scale: Annotated[float, _timed("Arrival times are multiplied by this: 2 halves the load.")] = 1.0,
) -> None:
    """Replay traces through the real control plane without a model. The same input gives the same bytes."""
    from anaphora.sim.cost_model import CostModel
    from anaphora.sim.mooncake import read_mooncake
    from anaphora.sim.plot import check_plotting, write_plot
    from anaphora.sim.sweep import Sweep, run_sweep
    from anaphora.sim.timed import TimedOptions

    sweep = Sweep(
        blocks=_numbers("--blocks", blocks),
        block_sizes=_numbers("--block-size", block_size),
        policies=_policies(policy),
        mode=mode,
        with_outputs=outputs,
        timed=TimedOptions(
            CostModel(overhead_ms / 1e3, token_us / 1e6, attention_ns / 1e9),
            max_num_batched_tokens,
            max_num_seqs,
            arrival_scale,
        ),
    )
    if plot is not None:
        check_plotting()
    documents = []
    for path in traces:
        trace = read_mooncake(path, skip_bad=skip_bad)
        with _progress(path.name, sweep.num_replays(trace) * len(trace.requests)) as advance:
            documents.append(run_sweep(trace, sweep, advance))
    if plot is not None:
        write_plot(documents, plot)
        console.stderr().print(f"wrote {plot}")
    if as_json:
        console.print_json({"traces": documents})
    else:
        for document in documents:
            _show(document)


def _policies(text: str) -> tuple[str, ...]:
    """`all` stands for every policy of the core, and may be one of several."""
    names = [name for part in text.split(",") for name in (POLICIES if part == "all" else (part,))]
    return tuple(dict.fromkeys(names))


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    """`1k,5000` -> (1000, 5000): k and M stand for a thousand and a million."""
    if text is None:
        return ()
    numbers = []
    for part in text.split(","):
        digits = part.strip().removesuffix("k").removesuffix("M")
        unit = {"k": 1000, "M": 1_000_000}.get(part.strip()[len(digits) :], 1)
        if not (digits.isascii() and digits.isdigit()) or int(digits) < 1:
            raise ConfigError(f"{option} must be integers >= 1 with commas between them, got {text!r}")
        numbers.append(int(digits) * unit)
    return tuple(dict.fromkeys(numbers))


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the body runs, where stderr is a terminal."""
    from rich.progress import Progress

    with Progress(console=console.stderr(), transient=True, disable=not console.stderr().is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.advance(task, done)


def _show(document: dict[str, Any]) -> None:
    skipped = document["num_skipped_lines"]
    lines = [
        f"{document['trace']}: {document['num_requests']:,} requests, {document['num_input_tokens']:,} prompt tokens"
        + (f", {skipped:,} broken lines left out" if skipped else "")
    ]
    timed = document["mode"] == "timed"
    header = ("policy", "blocks", "tokens", "hit rate", "saved", "computed", "evicted", "refused")
    for sizes in document["block_sizes"]:
        size, distinct = sizes["block_size"], sizes["num_distinct_blocks"]
        rows = [header + (("TTFT p50 s", "p99 s", "queue s", "wait s", "compute s") if timed else ())]
        rows += [(*_row(point, size), *(_times(point) if timed else ())) for point in sizes["points"]]
        rows.append(("unbounded", f"{distinct:,}", f"{distinct * size:,}", f"{sizes['unbounded_hit_rate']:.2%}"))
        lines += ["", f"{document['mode']}, block size {size}{'' if sizes['exact'] else ' (hits are a lower bound)'}"]
        lines += _aligned(rows)
    # Of no terminal's width: the same input gives the same bytes everywhere.
    typer.echo("\n".join([*lines, ""]))


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
