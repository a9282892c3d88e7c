"""`anaphora chat`: a conversation in the terminal, and how much of it each turn reused."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from anaphora.cli import console
from anaphora.cli.options import CacheSalt, EngineOptions, SamplingOptions, flatten_options
from anaphora.cli.prompts import check_utf8, not_utf8
from anaphora.cli.report import Limits, request_line
from anaphora.errors import InvalidParameterError, RequestError, StepFailedError

if TYPE_CHECKING:
    from anaphora.api.llm import LLM
    from anaphora.sampling_params import SamplingParams

Message = dict[str, str]

_COMMAND = re.compile(r"/\w+(\s|$)")  # a path has a second slash


@flatten_options
def chat(
    context: typer.Context,
    *,
    system: Annotated[str | None, typer.Option(help="System message that begins the conversation.")] = None,
    cache_salt: CacheSalt = None,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk to a model. After each turn one line says how much of the conversation came from the cache.

    /reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops the answer. Piped input is one turn a line.
    """
    if sampling.logprobs is not None:
        raise typer.BadParameter("--logprobs has no place in a conversation: see `generate --logprobs --json`")
    params = sampling.params()
    engine.check_names(needs_chat_template=True)
    llm = engine.load()
    limits = Limits.of(llm.engine, params)
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    out = console.stdout()
    interactive = sys.stdin.isatty()
    if interactive:
        out.print("/reset forgets the conversation, /exit ends, Ctrl-C stops an answer", style="dim")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() history and line editing, where the platform has it)
    while True:
        try:
            text = _read_turn(out, interactive)
            if text is None:
                break
            if text == "/reset":
                messages = list(first)
                out.print("conversation forgotten", style="dim")
            elif text:
                turn = [*messages, {"role": "user", "content": text}]
                answer = _answer(llm, turn, params, cache_salt, limits, out)
                if answer:  # stopped before its first word: as if nothing had been asked
                    messages = [*turn, {"role": "assistant", "content": answer}]
        except (RequestError, StepFailedError) as error:
            if not interactive:
                raise
            console.print_error(error, context.command)


def _read_turn(out: Console, interactive: bool) -> str | None:
    """The next line without the spaces around it; None at the end.

    Raises InvalidParameterError for a command that there is not, and for what is not UTF-8.
    """
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
        except UnicodeDecodeError as error:
            raise not_utf8("the input", error) from None
        check_utf8(text, "the input")
        if text == "/exit":
            return None
        if text != "/reset" and _COMMAND.match(text):
            raise InvalidParameterError(
                f"{text.split()[0]}: the commands are /reset and /exit, alone on a line; nothing was sent"
            )
        return text


def _answer(
    llm: LLM, messages: list[Message], params: SamplingParams, cache_salt: str | None, limits: Limits, out: Console
) -> str:
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
        out.print(request_line(final, limits), style="dim")
    return "".join(parts)
