"""`anaphora models`: the built-in names, and which of them are here already; or what exactly one model is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from anaphora.cli import console
from anaphora.cli.options import JsonFlag
from anaphora.config import EngineConfig
from anaphora.core.hashing import root_digest


def models(
    cache_dir: Annotated[Path | None, typer.Option(help="Where fetched models are kept.")] = None,
    identity: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Show what this model is, in the fields that name its cached blocks."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --identity: as for serve.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="With --identity: as for serve.")] = None,
    block_size: Annotated[int, typer.Option(help="With --identity: as for serve.")] = 16,
    as_json: JsonFlag = False,
) -> None:
    """List the built-in models. Folders, GGUF files and hub ids work wherever a name does."""
    if identity is not None:
        config = EngineConfig(
            model=identity, dtype=dtype, quantization=quantization, block_size=block_size, cache_dir=cache_dir
        )
        _show_identity(config, as_json)
        return
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


def _show_identity(config: EngineConfig, as_json: bool) -> None:
    """The fields of the root and their digest (docs/hash-format.md): equal digests compute equal K/V."""
    from anaphora.api.build import model_identity
    from anaphora.runtime.model import load_model

    loaded = load_model(config.model, dtype=config.dtype, quantization=config.quantization, cache_dir=config.cache_dir)
    fields = model_identity(config, loaded)
    root = root_digest(fields).hex()
    if as_json:
        console.print_json({"root": root, "identity": fields})
        return
    table = Table(Column("field", no_wrap=True), Column("value", overflow="fold"))
    for name in sorted(fields):
        table.add_row(name, fields[name])
    table.add_section()
    table.add_row("root", root)
    console.tables().print(table)
