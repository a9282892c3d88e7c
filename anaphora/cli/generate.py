"""`anaphora generate`: several prompts at once, and how much of each came from the cache."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from anaphora.cli import console
from anaphora.cli.options import CacheSalt, EngineOptions, JsonFlag, SamplingOptions, flatten_options
from anaphora.cli.prompts import read_prompts
from anaphora.cli.report import Limits, request_document, request_line
from anaphora.engine.outputs import RequestOutput
from anaphora.errors import StepFailedError
from anaphora.runtime.sources.names import is_model


@flatten_options
def generate(
    context: typer.Context,
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
    source = context.get_parameter_source("model")
    if prompts and source is not None and source.name == "DEFAULT" and is_model(prompts[0]):
        raise typer.BadParameter(
            f"{prompts[0]!r} is a model, and stands where a prompt does: name it with -m {prompts[0]}. "
            "To take it for a prompt, name the model that reads it, too"
        )
    engine.check_names(needs_chat_template=chat)
    texts = read_prompts(prompts or [], file or [])
    with console.only_json() if as_json else contextlib.nullcontext():
        llm = engine.load()
        show = None if as_json else InOrder(texts, Limits.of(llm.engine, params))
        if chat:
            first = [] if system is None else [{"role": "system", "content": system}]
            messages = [[*first, {"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(messages, params, cache_salt=cache_salt, on_output=show)
        else:
            outputs = llm.generate(texts, params, cache_salt=cache_salt, on_output=show)
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
    failed = [f"{number} ({output.error})" for number, output in enumerate(outputs, start=1) if output.error]
    if failed:
        raise StepFailedError(f"{len(failed)} of {len(outputs)} requests failed: {', '.join(failed)}")


class InOrder:
    """Prints each output as soon as all before it have been printed."""

    def __init__(self, texts: Sequence[str], limits: Limits) -> None:
        self._texts = texts
        self._limits = limits
        self._waiting: dict[int, RequestOutput] = {}
        self._num_shown = 0

    def __call__(self, index: int, output: RequestOutput) -> None:
        self._waiting[index] = output
        while (ready := self._waiting.pop(self._num_shown, None)) is not None:
            self._show(ready)
            self._num_shown += 1

    def _show(self, output: RequestOutput) -> None:
        out = console.stdout()
        if len(self._texts) > 1:
            text = _shorten(self._texts[self._num_shown])
            out.print(f"[{self._num_shown + 1}/{len(self._texts)}] {text}", style="bold")
        out.out(output.outputs[0].text)
        out.print(request_line(output, self._limits), style="dim")
        out.file.flush()


def _shorten(text: str, width: int = 72) -> str:
    """The prompt's end, which is where prompts of one beginning differ."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"… {line[2 - width :]}"
