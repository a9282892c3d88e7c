"""`anaphora bench`: what caching gains, in this process and on any OpenAI-compatible server, measured side by side."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anaphora.cli import console
from anaphora.cli.options import DEFAULT_MODEL, JsonFlag
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.bench.in_process import EngineSpec
    from anaphora.bench.measurement import Target

_QUICK_S = 100.0  # of two minutes: the last round may run over, and the model has to load
_WIDE_RANGE = (1000, 30_000)  # inside the vocabulary of nearly every model, and past its special tokens


def _panel(title: str) -> Callable[..., Any]:
    def option(*flags: str, help: str, **more: Any) -> Any:
        return typer.Option(*flags, help=help, rich_help_panel=title, **more)

    return option


_target, _sweep, _run = _panel("Targets"), _panel("Sweep"), _panel("Run")


def bench(
    model: Annotated[
        list[str] | None,
        _target("--model", "-m", help=f"In this process. Repeatable. {DEFAULT_MODEL} without any target."),
    ] = None,
    url: Annotated[
        list[str] | None,
        _target(metavar="[NAME=]URL", help="An OpenAI-compatible server, such as http://127.0.0.1:8000. Repeatable."),
    ] = None,
    engine: Annotated[
        list[str] | None, _target(metavar="OPTION=VALUE", help="An engine option of every --model. Repeatable.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        _target(metavar="NAME:OPTION=VALUE,...", help="Every --model once more with other options. Repeatable."),
    ] = None,
    caching: Annotated[str, _target(help="Of every --model: `on`, `off` or `on,off`.")] = "on,off",
    served_model: Annotated[str | None, _target(help="Model to ask servers for; else the first one they list.")] = None,
    api_key: Annotated[
        str | None, _target(envvar="ANAPHORA_BENCH_API_KEY", help="Sent to servers; better in the environment.")
    ] = None,
    pool_tokens: Annotated[
        int | None, _target(min=1, help="Tokens that a server's cache holds, where its metrics do not say.")
    ] = None,
    timeout: Annotated[float, _target(help="Most seconds that a server may be silent.")] = 600.0,
    prefixes: Annotated[str, _sweep(metavar="N,...", help="Shared prefixes, tokens.")] = "128,512,2048",
    outputs: Annotated[str, _sweep(metavar="N,...", help="Outputs, tokens.")] = "1,32,256",
    concurrency: Annotated[str, _sweep(metavar="N,...", help="Requests at once.")] = "1,8",
    interference: Annotated[
        str, _sweep(metavar="X,...", help="Tokens of other prompts before the hit, as shares of the pool.")
    ] = "0,1.25",
    sharers: Annotated[str, _sweep(metavar="N,...", help="Requests at once with one long prefix; `none`.")] = "1,2,4,8",
    suffix: Annotated[int, _sweep(help="Tokens of each prompt after its shared prefix.")] = 32,
    counter_examples: Annotated[
        bool, _sweep("--counter-examples/--no-counter-examples", help="Probe what must not hit.")
    ] = True,
    quick: Annotated[bool, _sweep("--quick", help="The most telling cells, within two minutes.")] = False,
    repeats: Annotated[int, _run(min=1, help="Trials of each cell; 6 place a median at 95 %.")] = 6,
    budget: Annotated[float | None, _run(help="Seconds after which no further round begins.")] = None,
    seed: Annotated[int, _run(help="Where the prompts come from.")] = 0,
    token_range: Annotated[
        str | None, _run(metavar="LOW:HIGH", help="Token ids of the prompts; else inside the vocabulary.")
    ] = None,
    max_interference_tokens: Annotated[int, _run(min=0, help="Most tokens of other prompts in one trial.")] = 32_768,
    state: Annotated[Path, _run(help="Where finished trials are kept until the run is over.")] = Path(
        "anaphora-bench.state.jsonl"
    ),
    fresh: Annotated[bool, _run("--fresh", help="Begin anew, whatever the state file holds.")] = False,
    csv: Annotated[Path | None, _run(help="Write the rows here.")] = None,
    markdown: Annotated[Path | None, _run(help="Write the whole report here.")] = None,
    plot: Annotated[Path | None, _run(metavar="DIR", help="Write pictures here (needs matplotlib).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure prefix caching: the same requests to every target in turn. A killed run goes on when run again."""
    began_s = time.perf_counter()
    from anaphora.bench.cases import Sweep, quick_sweep
    from anaphora.bench.document import make_document, versions
    from anaphora.bench.http_client import Server
    from anaphora.bench.http_target import HttpTarget
    from anaphora.bench.in_process import engine_specs, parse_options
    from anaphora.bench.journal import Journal
    from anaphora.bench.plot import check_plotting, write_plots
    from anaphora.bench.prompts import Prompts
    from anaphora.bench.runner import Budget, Plan, run_plan
    from anaphora.bench.tables import to_csv, to_markdown
    from anaphora.bench.trial import Limits

    if plot is not None:
        check_plotting()
    sweep = Sweep(
        prefixes=_integers("--prefixes", prefixes),
        outputs=_integers("--outputs", outputs),
        concurrency=_integers("--concurrency", concurrency),
        interference=_shares(interference),
        sharers=() if sharers == "none" else _integers("--sharers", sharers),
        suffix=suffix,
        counter_examples=counter_examples,
    )
    groups = quick_sweep() if quick else sweep.groups()
    models = model or ([] if url else [DEFAULT_MODEL])
    specs = engine_specs(models, parse_options(engine or ()), variant or (), _on_off(caching))
    servers = [
        HttpTarget(name, Server(address, api_key, timeout), model=served_model, pool_tokens=pool_tokens)
        for name, address in map(_named, url or ())
    ]
    names = [*(spec.name for spec in specs), *(server.name for server in servers)]
    if len(set(names)) < len(names):
        raise ConfigError(f"two targets have one name: {', '.join(names)}; name them, as in --url NAME=URL")
    given = None if token_range is None else _range(token_range)
    engines, vocab_size = _load(specs)
    low, high = given or _inside(vocab_size)
    prompts = Prompts(seed, low, high)
    for server in servers:
        server.open(prompts.draw("hello", 8))
    targets: list[Target] = [*engines, *servers]
    plan = Plan(tuple(groups), repeats, prompts, Limits(max_interference_tokens))
    if fresh:
        state.unlink(missing_ok=True)
    journal = Journal(state, {**plan.identity(targets), "versions": versions()})
    num_resumed = len(journal.trials)
    if num_resumed:
        console.stderr().print(f"finished trials in {state}: {num_resumed}; --fresh would begin anew")
    seconds = budget if budget is not None else _QUICK_S if quick else None
    with _progress(plan.num_trials(targets)) as progress:
        run_plan(
            plan,
            targets,
            journal,
            budget=Budget(None if seconds is None else began_s + seconds),
            progress=progress,
        )
    document = make_document(plan, targets, journal, command=_command(), num_resumed=num_resumed)
    for target in targets:
        target.close()
    for path, text in ((csv, to_csv), (markdown, to_markdown)):
        if path is not None:
            _write(path, text(document))
    for picture in () if plot is None else write_plots(document, plot):
        console.stderr().print(f"wrote {picture}")
    if as_json:
        console.print_json(document)
    else:
        typer.echo(to_markdown(document), nl=False)
    journal.remove()


def _load(specs: Sequence[EngineSpec]) -> tuple[list[Any], int | None]:
    """Engines' targets and the smallest vocabulary among them. Raises ConfigError, ModelError."""
    if not specs:
        return [], None
    from anaphora.bench.engine_target import EngineTarget
    from anaphora.runtime.model import load_model

    loaded: dict[tuple[Any, ...], Any] = {}
    targets = []
    for spec in specs:
        config = spec.config
        key = (config.model, config.tokenizer, config.dtype, config.device)
        if key not in loaded:
            loaded[key] = load_model(
                config.model,
                tokenizer=config.tokenizer,
                dtype=config.dtype,
                device=config.device,
                cache_dir=config.cache_dir,
                progress=True,
            )
        targets.append(EngineTarget(spec.name, config, loaded[key]))
    return targets, min(model.vocab_size for model in loaded.values())


def _command() -> str:
    """What was typed, without a key."""
    words: list[str] = []
    for word in sys.argv[1:]:
        hidden = bool(words) and words[-1] == "--api-key"
        words.append("..." if hidden else "--api-key=..." if word.startswith("--api-key=") else word)
    return f"anaphora {shlex.join(words)}"


def _named(text: str) -> tuple[str, str]:
    """`vllm=http://host:8000` -> (vllm, http://host:8000); without a name the address is the name."""
    name, equals, address = text.partition("=")
    if not equals or "/" in name:
        return text, text
    return name, address


def _inside(vocab_size: int | None) -> tuple[int, int]:
    if vocab_size is None or vocab_size > _WIDE_RANGE[1]:
        return _WIDE_RANGE
    return vocab_size // 16, vocab_size


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
        raise ConfigError(f"--token-range must look like LOW:HIGH, got {text!r}")
    return int(low), int(high)


def _on_off(text: str) -> list[bool]:
    words = text.split(",")
    if not set(words) <= {"on", "off"}:
        raise ConfigError(f"--caching must be `on`, `off` or `on,off`, got {text!r}")
    return [word == "on" for word in dict.fromkeys(words)]


def _integers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} must be integers >= 1 with commas between them, got {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--interference must be numbers with commas between them, got {text!r}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    console.stderr().print(f"wrote {path}")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr while the body runs, where stderr is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console.stderr(), transient=True, disable=not console.stderr().is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, trials: bar.update(task, description=what, advance=trials)
