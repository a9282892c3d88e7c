"""`anaphora simulate`: what a cache of a given size would reuse on recorded traffic, before it is bought."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anaphora.cli import console
from anaphora.cli.options import JsonFlag
from anaphora.cli.simulate_table import show
from anaphora.core.eviction import POLICIES
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.sim.cost_model import CostModel
    from anaphora.sim.trace import Trace

_POLICIES = ", ".join(POLICIES)


def _timed(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel="Timed mode")


def _made(*flags: str, help: str) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Generated workload")


def simulate(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="TRACE",
            help="Recorded by --record, in Mooncake's JSONL format, or a log of OpenAI-style requests; may be gzip'd; "
            "- is stdin.",
        ),
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(metavar="N,...", help="Pool sizes; without it, up to the trace's working set.")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(metavar="B,...", help="Token positions in a block; without it, the trace's own.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="P,...", help=f"Of {_POLICIES}; or `all` of them, or `offline` (the bound).")
    ] = "lru",
    mode: Annotated[
        str, typer.Option(help="`sequential`: one request after the other. `timed`: as they arrive, with a cost model.")
    ] = "sequential",
    outputs: Annotated[
        bool | None,
        typer.Option(
            "--outputs/--no-outputs",
            help="Sequential: outputs are computed and cached too; without it, if the trace names their blocks.",
        ),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave broken lines out and count them.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer (and chat template) for a log of requests.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write hit rate against capacity here (needs matplotlib).")] = None,
    as_json: JsonFlag = False,
    cost: Annotated[
        str | None,
        _timed(
            "Of a step: overhead=5ms,token=40us,attention=1.5ns; a token is a scheduled one, attention is of a pair."
        ),
    ] = None,
    cost_from: Annotated[Path | None, _timed("Fit the cost to what `anaphora bench --json` measured.")] = None,
    max_num_batched_tokens: Annotated[int, _timed("Most tokens scheduled in one step.")] = 8192,
    max_num_seqs: Annotated[int, _timed("Most requests running at once.")] = 256,
    arrival_scale: Annotated[float, _timed("Arrival times are multiplied by this: 2 halves the load.")] = 1.0,
    generate: Annotated[
        str | None, _made("--generate", help="Make a trace: shared-prefix, chat, agents or rag.")
    ] = None,
    requests: Annotated[int | None, _made(help="How many.")] = None,
    rate: Annotated[float | None, _made(help="Requests a second, on average.")] = None,
    seed: Annotated[int | None, _made(help="Another seed, another trace of the kind.")] = None,
    groups: Annotated[int | None, _made(help="Prefixes, system prompts or documents.")] = None,
    shared_tokens: Annotated[int | None, _made(help="Mean length of one of them.")] = None,
    own_tokens: Annotated[int | None, _made(help="Mean length of what only one request has.")] = None,
    output_tokens: Annotated[int | None, _made(help="Mean length of an output.")] = None,
    write: Annotated[Path | None, _made("--write", help="Write the trace here, in Mooncake's format.")] = None,
) -> None:
    """Replay traces through the real control plane without a model. The same input gives the same bytes."""
    from anaphora.sim.plot import check_plotting, write_plot
    from anaphora.sim.sweep import Sweep, run_sweep
    from anaphora.sim.timed import TimedOptions

    block_sizes = _numbers("--block-size", block_size)
    cost_model, fit = _cost(cost, cost_from)
    sweep = Sweep(
        blocks=_numbers("--blocks", blocks),
        block_sizes=block_sizes,
        policies=_policies(policy),
        mode=mode,
        with_outputs=outputs,
        timed=TimedOptions(cost_model, max_num_batched_tokens, max_num_seqs, arrival_scale),
    )
    if plot is not None:
        check_plotting()
    lengths = {
        "requests": requests,
        "rate": rate,
        "seed": seed,
        "groups": groups,
        "shared_tokens": shared_tokens,
        "own_tokens": own_tokens,
        "output_tokens": output_tokens,
    }
    if generate is not None:
        made = _generate(generate, traces, lengths, block_sizes, write)
    elif write is not None or any(value is not None for value in lengths.values()):
        raise ConfigError("--write and what it is made of need --generate KIND")
    else:
        made = (_read(path, skip_bad, tokenizer, block_sizes) for path in traces or ())
    documents = []
    for trace in made:
        with _progress(trace.name, sweep.num_replays(trace) * len(trace.requests)) as advance:
            documents.append(run_sweep(trace, sweep, advance) | ({"cost_fit": fit} if mode == "timed" else {}))
    if not documents:
        raise ConfigError("give a TRACE to replay, or --generate KIND")
    if plot is not None:
        write_plot(documents, plot)
        console.stderr().print(f"wrote {plot}")
    if as_json:
        console.print_json({"traces": documents})
    else:
        for document in documents:
            show(document)


def _read(path: Path, skip_bad: bool, tokenizer: Path | None, block_sizes: Sequence[int]) -> Trace:
    from anaphora.sim.reading import read_trace
    from anaphora.sim.request_log import DEFAULT_BLOCK_SIZE

    def load() -> Any:
        """Brings torch: only a log needs it."""
        from anaphora.runtime.sources.folder import load_tokenizer

        loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
        if loaded is None:
            raise ConfigError(f"there is no tokenizer in {tokenizer}: give a folder with a tokenizer.json")
        return loaded

    return read_trace(
        path,
        skip_bad=skip_bad,
        load_tokenizer=None if tokenizer is None else load,
        log_block_size=math.gcd(*block_sizes) or DEFAULT_BLOCK_SIZE,
    )


def _generate(
    kind: str,
    traces: Sequence[Path] | None,
    values: dict[str, Any],
    block_sizes: Sequence[int],
    write: Path | None,
) -> Iterator[Trace]:
    """The trace, written out too if that is wanted: with ids of 512 tokens, as Mooncake's, unless sizes are given."""
    from anaphora.sim.mooncake import BLOCK_SIZE
    from anaphora.sim.request_log import DEFAULT_BLOCK_SIZE
    from anaphora.sim.workloads import generate_trace, workload
    from anaphora.sim.writing import write_trace

    if traces:
        raise ConfigError("--generate makes the trace: give no TRACE beside it")
    wanted = workload(kind, **values)
    size = math.gcd(*block_sizes)
    if write is not None:
        write_trace(generate_trace(wanted, size or BLOCK_SIZE), write)
        console.stderr().print(f"wrote {write}")
    yield generate_trace(wanted, size or DEFAULT_BLOCK_SIZE)


def _cost(given: str | None, measured: Path | None) -> tuple[CostModel, dict[str, Any] | None]:
    """And how well it fits, if it was measured."""
    from anaphora.sim.cost_fit import read_cost
    from anaphora.sim.cost_model import CostModel, parse_cost

    if given is not None and measured is not None:
        raise ConfigError("--cost and --cost-from both say what a step costs: give one of them")
    if measured is None:
        return (CostModel() if given is None else parse_cost(given)), None
    fitted = read_cost(measured)
    return fitted.model, {
        "num_requests": fitted.num_requests,
        "residual_s": fitted.residual_s,
        "largest_residual_s": fitted.largest_residual_s,
    }


def _policies(text: str) -> tuple[str, ...]:
    """`all` stands for every policy of the core, and may be one of several."""
    names = [name for part in text.split(",") for name in (POLICIES if part == "all" else (part,))]
    return tuple(dict.fromkeys(names))


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    """`1k,5000` -> (1000, 5000): k and M stand for a thousand and a million."""
    if text is None:
        return ()
    numbers = []
    for part in text.split(","):
        digits = part.strip().removesuffix("k").removesuffix("M")
        unit = {"k": 1000, "M": 1_000_000}.get(part.strip()[len(digits) :], 1)
        if not (digits.isascii() and digits.isdigit()) or int(digits) < 1:
            raise ConfigError(f"{option} must be integers >= 1 with commas between them, got {text!r}")
        numbers.append(int(digits) * unit)
    return tuple(dict.fromkeys(numbers))


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the body runs, where stderr is a terminal."""
    from rich.progress import Progress

    with Progress(console=console.stderr(), transient=True, disable=not console.stderr().is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.advance(task, done)
