"""`anaphora demo`: runs the demo's acts on a real model, shows the tables and fails if a claim does not hold."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from anaphora.cli import console
from anaphora.cli.demo_acts import Act, Stage, run_acts
from anaphora.cli.options import DEFAULT_MODEL, JsonFlag
from anaphora.runtime.sources.names import check_names

_BLOCK_SIZE = 16
_NUM_BLOCKS = 1024  # eight prompts side by side with caching off, and room to spare
_SMALL_NUM_BLOCKS = 40  # so few that one other prompt pushes everything out


def demo(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Built-in name, folder, GGUF file or hub id.")
    ] = DEFAULT_MODEL,
    num_threads: Annotated[int | None, typer.Option(help="Torch's threads; without it torch chooses.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what prefix caching does on a real model, and check every claim. Exit code 1 if one fails.

    Weights and K/V are float32, so that answers with and without the cache can be compared token for token.
    """
    check_names(model)
    acts = []
    with console.only_json() if as_json else contextlib.nullcontext():
        stage = open_stage(model, num_threads)
        with console.stderr().status("running: a minute or two on two cores"):  # shown on a terminal only
            for act in run_acts(stage):
                acts.append(act)
                if not as_json:
                    _show(act)
    holds = all(act.holds for act in acts)
    if as_json:
        console.print_json(
            {"model": model, "dtype": "float32", "holds": holds, "acts": [_document(act) for act in acts]}
        )
    else:
        _show_verdict(acts)
    if not holds:
        raise typer.Exit(1)


def open_stage(model: str, num_threads: int | None) -> Stage:
    """Three engines over one model, which is loaded once. Raises ConfigError and ModelError."""
    import torch

    from anaphora.api.build import connect
    from anaphora.api.llm import LLM
    from anaphora.config import EngineConfig
    from anaphora.runtime.model import load_model

    config = EngineConfig(model=model, block_size=_BLOCK_SIZE, num_blocks=_NUM_BLOCKS, num_threads=num_threads)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(model, dtype="float32", progress=True)

    def engine(**changes: Any) -> LLM:
        changed = dataclasses.replace(config, **changes)
        return LLM.from_engine(connect(changed, loaded))

    return Stage(
        cached=engine(),
        uncached=engine(enable_prefix_caching=False),
        small=engine(num_blocks=_SMALL_NUM_BLOCKS),
        block_size=_BLOCK_SIZE,
        small_num_blocks=_SMALL_NUM_BLOCKS,
    )


def _document(act: Act) -> dict[str, Any]:
    rows = [{**dataclasses.asdict(row), "hit_rate": row.hit_rate} for row in act.rows]
    return {**dataclasses.asdict(act), "rows": rows, "holds": act.holds}


def _show(act: Act) -> None:
    out = console.tables()
    out.print()
    out.print(act.title, style="bold")
    out.print(act.note, style="dim")
    out.print(_rows_table(act))
    for row in act.rows:
        if row.answer:
            out.print(f" {row.label}: … {row.answer}", style="dim")
    out.print(_claims_table(act))


def _show_verdict(acts: Sequence[Act]) -> None:
    claims = [claim for act in acts for claim in act.claims]
    num_held = sum(claim.holds for claim in claims)
    out = console.tables()
    out.print()
    out.print(f"{num_held} of {len(claims)} claims hold", style="bold green" if num_held == len(claims) else "bold red")


def _rows_table(act: Act) -> Table:
    evicts = any(row.evicted_blocks for row in act.rows)
    table = Table(Column("request", no_wrap=True), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = ["prompt", "cached", "computed", "Δqueries", "Δhits", "hit rate", "TTFT", "E2E"]
    for name in [*names, "evicted"] if evicts else names:
        table.add_column(name, justify="right")
    for row in act.rows:
        counts = (row.prompt_tokens, row.cached_tokens, row.computed_tokens, row.queries, row.hits)
        cells = [f"{count:,}" for count in counts]
        cells += [f"{row.hit_rate:.1%}", f"{row.ttft_s:.3f} s", f"{row.e2e_s:.3f} s"]
        table.add_row(row.label, *cells, *([f"{row.evicted_blocks} blocks"] if evicts else []))
    return table


def _claims_table(act: Act) -> Table:
    table = Table(
        "claim",
        Column("expected", justify="right"),
        Column("found", justify="right"),
        "",
        box=None,
        padding=(0, 2, 0, 1),
    )
    for claim in act.claims:
        verdict, style = ("holds", None) if claim.holds else ("FAILS", "bold red")
        table.add_row(claim.text, claim.expected, claim.found, verdict, style=style)
    return table
