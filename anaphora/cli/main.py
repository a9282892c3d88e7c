"""The entry point: the commands, one way to report errors, and what must be set before torch is imported.

Knows the commands and `anaphora.errors`; must not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from anaphora.api.openmp import let_idle_threads_sleep
from anaphora.cli import console
from anaphora.cli.bench import bench
from anaphora.cli.chat import chat
from anaphora.cli.demo import demo
from anaphora.cli.forget import forget
from anaphora.cli.generate import generate
from anaphora.cli.help import PlainCommand, PlainGroup
from anaphora.cli.models import models
from anaphora.cli.serve import serve
from anaphora.cli.simulate import simulate
from anaphora.cli.top import top
from anaphora.errors import (
    AdapterError,
    AnaphoraError,
    ConfigError,
    ModelFileError,
    RequestError,
    UnknownModelError,
    UnsupportedModelError,
)

_USER_ERRORS = (AdapterError, ConfigError, RequestError, UnknownModelError, ModelFileError, UnsupportedModelError)


class _ReportingGroup(PlainGroup):
    """Turns the errors that Anaphora raises on purpose into one line and an exit code; others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AnaphoraError as error:
            if ctx.params["debug"]:
                raise
            has_options = isinstance(error, ConfigError | RequestError)  # what others name, nobody typed
            console.print_error(error, self.commands.get(ctx.invoked_subcommand) if has_options else None)
            raise typer.Exit(2 if isinstance(error, _USER_ERRORS) else 1) from error


app = typer.Typer(
    cls=_ReportingGroup,
    help="LLM serving that never computes the same beginning twice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anaphora {version('anaphora')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="ANAPHORA_DEBUG", help="Show the whole traceback of an error.")
    ] = False,
) -> None:
    # An empty body: --version acts in its callback, --debug is read by _ReportingGroup.
    pass


for _command in (generate, chat, serve, demo, models, simulate, bench, top, forget):
    app.command(cls=PlainCommand)(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: it failed, or a claim of the demo does not hold. 2: wrong usage, request, option or model.
    130: interrupted.
    """
    let_idle_threads_sleep()
    _open_closed_streams()
    try:
        app(args=argv, prog_name="anaphora")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except OSError as error:  # a full disk behind stdout; a command's own files raise errors of ours
        code = _lost_stdout(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        lost = _lost_stdout(error)
        code = code or lost
    return code


def _open_closed_streams() -> None:
    """A standard stream that the caller has closed (`>&-`) reads and writes nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (as long as the process)


def _lost_stdout(error: OSError) -> int:
    """Nothing can be written any more: quietly if the reader left (`| head`), else with a word why."""
    if not isinstance(error, BrokenPipeError):
        console.print_error(error)
    # The interpreter flushes once more on its way out: give it somewhere to flush to.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
