"""`anaphora generate`: several prompts at once, and how much of each came from the cache."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from anaphora.cli import console
from anaphora.cli.options import CacheSalt, EngineOptions, JsonFlag, SamplingOptions, flatten_options
from anaphora.cli.prompts import read_prompts
from anaphora.cli.report import Limits, request_document, request_line
from anaphora.errors import StepFailedError


@flatten_options
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="The prompts; - reads one from stdin, as does a pipe where no prompt is given."),
    ] = None,
    *,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            "-f",
            exists=True,
            dir_okay=False,
            help="A file that holds one prompt; its final newline is dropped, as that of stdin is. Repeatable.",
        ),
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
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat: a raw prompt has no messages")
    if sampling.logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs needs --json: the text has no place for them")
    params = sampling.params()
    engine.check_names(needs_chat_template=chat)
    texts = read_prompts(prompts or [], file or [])
    with console.only_json() if as_json else contextlib.nullcontext():
        llm = engine.load()
        limits = Limits.of(llm.engine, params)
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
            out.print(request_line(output, limits), style="dim")
    failed = [f"{number} ({output.error})" for number, output in enumerate(outputs, start=1) if output.error]
    if failed:
        raise StepFailedError(f"{len(failed)} of {len(outputs)} requests failed: {', '.join(failed)}")


def _shorten(text: str, width: int = 72) -> str:
    """The prompt's end, which is where prompts of one beginning differ."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"… {line[2 - width :]}"
