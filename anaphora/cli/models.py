"""`anaphora models`: the built-in names, and which of them are here already."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from anaphora.cli import console
from anaphora.cli.options import JsonFlag


def models(
    cache_dir: Annotated[Path | None, typer.Option(help="Where fetched models are kept.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the built-in models. Folders, GGUF files and hub ids work wherever a name does."""
    from anaphora.runtime.sources import list_models

    found = list_models(cache_dir)
    if as_json:
        console.print_json(
            [
                {
                    **dataclasses.asdict(info),
                    "path": None if info.path is None else str(info.path),
                    "cached": info.cached,
                }
                for info in found
            ]
        )
        return
    table = Table(Column("name", no_wrap=True), "what it is", "licence", "download", "on disk", "here")
    for info in found:
        sizes = [f"{num_bytes / 1e6:,.0f} MB" for num_bytes in (info.download_bytes, info.converted_bytes)]
        table.add_row(info.name, info.description, info.licence, *sizes, "yes" if info.cached else "no")
    out = console.tables()
    out.print(table)
    out.print("A model that is not here is fetched and converted on first use.", style="dim")
