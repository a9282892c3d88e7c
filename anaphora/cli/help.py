"""`--help` as plain text under headings: typer's own tables cut long option names off at 80 columns.

Knows typer; must not know a command or an option.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose options are listed under their panels' names, each name whole."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                own = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or own, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)


class PlainGroup(TyperGroup):
    """Commands with the first line of their help, whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, (command.help or "").partition("\n")[0]) for name, command in self.commands.items()]
            )
