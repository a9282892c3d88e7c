"""`anaphora generate`: several prompts at once, and how much of each came from the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from anaphora.cli import console
from anaphora.cli.options import CacheSalt, EngineOptions, JsonFlag, SamplingOptions, flatten_options
from anaphora.cli.report import request_document, request_line
from anaphora.errors import InvalidParameterError, StepFailedError


@flatten_options
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="The prompts; - reads one from stdin.")] = None,
    *,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="A file that holds one prompt. Repeatable."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Put each prompt through the model's chat template, or take it as it is."),
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message before each prompt; needs --chat.")] = None,
    cache_salt: CacheSalt = None,
    as_json: JsonFlag = False,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Generate from one or several prompts at once; a beginning that they share is computed once.

    Shows for each prompt the text, the cached and the computed tokens and the time to first token.
    """
    texts = _read_prompts(prompts or [], file or [])
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat: a raw prompt has no messages")
    params = sampling.params()
    with console.only_json() if as_json else contextlib.nullcontext():
        from anaphora import LLM

        llm = LLM(**dataclasses.asdict(engine))
        if chat:
            first = [] if system is None else [{"role": "system", "content": system}]
            outputs = llm.chat(
                [[*first, {"role": "user", "content": text}] for text in texts], params, cache_salt=cache_salt
            )
        else:
            outputs = llm.generate(texts, params, cache_salt=cache_salt)
        stats = llm.stats()
    if as_json:
        console.print_json(
            {
                "model": engine.model,
                "requests": [
                    {"prompt": text, **request_document(output)} for text, output in zip(texts, outputs, strict=True)
                ],
                "stats": dataclasses.asdict(stats),
            }
        )
    else:
        out = console.stdout()
        for number, (text, output) in enumerate(zip(texts, outputs, strict=True), start=1):
            if len(texts) > 1:
                out.print(f"[{number}/{len(texts)}] {_shorten(text)}", style="bold")
            out.out(output.outputs[0].text)
            out.print(request_line(output), style="dim")
    failed = [f"{number} ({output.error})" for number, output in enumerate(outputs, start=1) if output.error]
    if failed:
        raise StepFailedError(f"{len(failed)} of {len(outputs)} requests failed: {', '.join(failed)}")


def _read_prompts(arguments: list[str], files: list[Path]) -> list[str]:
    """Arguments first, then files, in the order given."""
    if arguments.count("-") > 1:
        raise typer.BadParameter("- stands for stdin, which can be read once only")
    texts = [sys.stdin.read() if text == "-" else text for text in arguments]
    for path in files:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidParameterError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not texts:
        raise typer.BadParameter("no prompt: give one as an argument, with --file, or - for stdin")
    return texts


def _shorten(text: str, width: int = 72) -> str:
    """The prompt's end, which is where prompts of one beginning differ."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"… {line[2 - width :]}"
