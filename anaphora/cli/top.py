"""`anaphora top`: a running server in a terminal. Knows rich and snapshots; must not know how a server works."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from anaphora.cli import console
from anaphora.cli.options import JsonFlag
from anaphora.cli.running_server import RunningServer
from anaphora.cli.top_snapshot import Snapshot, hit_rate, rate, snapshot_of, ttft_percentile
from anaphora.errors import ConfigError, ServerUnreachableError

_BAR_WIDTH = 40
_PERCENTILES = (0.5, 0.9, 0.99)
_RATES = (
    ("generated", "generation_tokens_total", "tokens/s"),
    ("computed", "computed_tokens_total", "tokens/s"),
    ("found", "prefix_cache_hits_total", "tokens/s"),
    ("evicted", "evicted_blocks_total", "blocks/s"),
    ("preempted", "num_preemptions_total", "requests/s"),
)


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running server, such as http://127.0.0.1:8000.")],
    api_key: Annotated[
        str | None, typer.Option(envvar="ANAPHORA_API_KEY", help="An admin's key; better in the environment.")
    ] = None,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print and end; for pipes.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Watch a server: its pool, hit rate, latency, what other pools would find, and its busiest beginnings."""
    if not 0.1 <= interval_s <= 3600:
        raise ConfigError(f"--interval must be from 0.1 to 3600 seconds, got {interval_s:g}")
    server = RunningServer(url, api_key)
    first = snapshot_of(server)
    if as_json:
        console.print_json(document(first))
    elif once or not sys.stdout.isatty():
        console.tables().print(view(url, first, None))
    else:
        _watch(server, first, interval_s)


def _watch(server: RunningServer, first: Snapshot, interval_s: float) -> None:
    """Until Ctrl-C. A server that is away for a while is waited for."""
    screen = console.tables()
    with Live(view(server.url, first, None), console=screen, screen=True, auto_refresh=False) as live:
        earlier = first
        try:
            while True:
                time.sleep(interval_s)
                try:
                    now = snapshot_of(server)
                except ServerUnreachableError as error:
                    live.update(str(error), refresh=True)
                    continue
                restarted = now["engine_steps_total"] < earlier["engine_steps_total"]
                live.update(view(server.url, now, None if restarted else earlier), refresh=True)
                earlier = now
        except KeyboardInterrupt:
            return


def document(now: Snapshot) -> dict[str, Any]:
    """One snapshot as plain data; rates in [0, 1], times in seconds."""
    return {
        "blocks": now.blocks,
        "num_pinned_blocks": int(now["kv_pinned_blocks"]),
        "requests": {state: int(now[f"num_requests_{state}"]) for state in ("running", "waiting", "following")},
        "hit_rate": hit_rate(now),
        "ttft_s": {f"p{share * 100:g}": ttft_percentile(share, now) for share in _PERCENTILES},
        "what_if": now.what_if,
        "prefixes": now.prefixes,
    }


def view(url: str, now: Snapshot, earlier: Snapshot | None) -> RenderableType:
    """earlier: what `now` columns are measured from; None shows the time since the start alone."""
    parts: list[RenderableType] = [
        f"anaphora top  {url}   running {now['num_requests_running']:,.0f}   waiting {now['num_requests_waiting']:,.0f}"
        f" (following {now['num_requests_following']:,.0f})",
        "",
        _pool(now),
        "",
        _rates(now, earlier),
    ]
    if now.what_if:
        parts += ["", _what_if(now)]
    parts += ["", _prefixes(now)]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _pool(now: Snapshot) -> RenderableType:
    blocks = now.blocks
    total = sum(blocks.values())
    table = _table("pool", "blocks", "share")
    table.add_column("")
    for state, number in blocks.items():
        share = number / total if total else 0.0
        table.add_row(state, f"{number:,}", f"{share:.1%}", "█" * round(share * _BAR_WIDTH))
    table.add_row("(pinned)", f"{now['kv_pinned_blocks']:,.0f}", "", "")
    return table


def _rates(now: Snapshot, earlier: Snapshot | None) -> RenderableType:
    table = _table("", "since start", "now")
    table.add_row("hit rate", _percent(hit_rate(now)), "" if earlier is None else _percent(hit_rate(now, earlier)))
    for share in _PERCENTILES:
        recent = "" if earlier is None else _seconds(ttft_percentile(share, now, earlier))
        table.add_row(f"first token, p{share * 100:g}", _seconds(ttft_percentile(share, now)), recent)
    for text, name, unit in _RATES:
        recent = "" if earlier is None else f"{rate(name, now, earlier):,.1f} {unit}"
        table.add_row(text, f"{now[name]:,.0f}", recent)
    return table


def _what_if(now: Snapshot) -> RenderableType:
    table = _table("what if the pool were", *now.what_if)
    table.add_row("hit rate under LRU", *(_percent(value) for value in now.what_if.values()))
    return table


def _prefixes(now: Snapshot) -> RenderableType:
    if now.prefixes is None:
        return "busiest beginnings: this server shows them to admins only"
    table = _table("busiest beginnings", "tokens", "requests", "tokens saved")
    for row in now.prefixes[:10]:
        table.add_row(row["hash"], f"{row['num_tokens']:,}", f"{row['num_requests']:,}", f"{row['num_hit_tokens']:,}")
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e3:,.0f} ms" if value < 10 else f"{value:,.1f} s"
