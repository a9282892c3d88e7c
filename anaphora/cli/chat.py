"""`anaphora chat`: a conversation in the terminal, and how much of it each turn reused."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from anaphora.cli import console
from anaphora.cli.options import CacheSalt, EngineOptions, SamplingOptions, flatten_options
from anaphora.cli.report import request_line
from anaphora.errors import RequestError, StepFailedError

if TYPE_CHECKING:
    from anaphora import LLM
    from anaphora.sampling_params import SamplingParams

Message = dict[str, str]


@flatten_options
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message that begins the conversation.")] = None,
    cache_salt: CacheSalt = None,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk to a model. After each turn one line says how much of the conversation came from the cache.

    /reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops the answer. Piped input is one turn a line.
    """
    params = sampling.params()
    from anaphora import LLM

    llm = LLM(**dataclasses.asdict(engine))
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    out = console.stdout()
    interactive = sys.stdin.isatty()
    if interactive:
        out.print("/reset forgets the conversation, /exit ends, Ctrl-C stops an answer", style="dim")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() history and line editing, where the platform has it)
    while (text := _read_turn(out, interactive)) is not None:
        if text == "/reset":
            messages = list(first)
            out.print("conversation forgotten", style="dim")
        elif text:
            try:
                answer = _answer(llm, [*messages, {"role": "user", "content": text}], params, cache_salt, out)
            except (RequestError, StepFailedError) as error:
                if not interactive:
                    raise
                console.print_error(error)
                continue
            if answer:  # stopped before its first word: as if nothing had been asked
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def _read_turn(out: Console, interactive: bool) -> str | None:
    """The next line without the spaces around it; None at the end."""
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                out.print()  # the shell's prompt begins a line of its own
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            out.print("\n/exit or Ctrl-D ends", style="dim")
            continue
        return None if text == "/exit" else text


def _answer(llm: LLM, messages: list[Message], params: SamplingParams, cache_salt: str | None, out: Console) -> str:
    """Stream one answer to the terminal and return its text, as far as it came."""
    parts: list[str] = []
    final = None
    stream = llm.stream(messages, params, cache_salt=cache_salt)
    try:
        for step in stream:
            parts.append(step.text)
            out.out(step.text, end="")
            out.file.flush()
            final = step.output
    except KeyboardInterrupt:
        out.print("\nstopped", style="dim")
    finally:
        stream.close()  # an answer that is not read to its end is aborted, and its blocks are free again
    if final is not None:
        out.out()
        if final.error is not None:
            raise StepFailedError(final.error)
        out.print(request_line(final), style="dim")
    return "".join(parts)
