"""What a running server says of itself at one moment, over HTTP, and what two moments say of the time between.

Knows /metrics and /debug/prefixes; must not know terminals.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anaphora.cli.running_server import RunningServer
from anaphora.errors import ConfigError, ServerUnreachableError

_PREFIX = "anaphora:"
_BUCKET = re.compile(r'time_to_first_token_seconds_bucket\{le="([^"]+)"\}')
_POOL = re.compile(r'what_if_hit_rate\{pool="([^"]+)"\}')


@dataclass(frozen=True, slots=True)
class Snapshot:
    """taken_s: when, by a clock that does not go back. samples: name with its labels -> value, without our prefix.

    prefixes: rows of /debug/prefixes; None where this server does not show them.
    """

    taken_s: float
    samples: Mapping[str, float]
    prefixes: list[dict[str, Any]] | None

    def __getitem__(self, name: str) -> float:
        """0 where the server says nothing of it."""
        return self.samples.get(name, 0.0)

    @property
    def blocks(self) -> dict[str, int]:
        """By state; they add up to the pool."""
        return {state: int(self[f'kv_blocks{{state="{state}"}}']) for state in ("live", "cached", "free")}

    @property
    def what_if(self) -> dict[str, float]:
        """Pool size (0.5x) -> hit rate since the start; empty where the server keeps no curve."""
        found = ((_POOL.fullmatch(name), value) for name, value in self.samples.items())
        return {match[1]: value for match, value in found if match is not None}

    @property
    def ttft_buckets(self) -> list[tuple[float, float]]:
        """(upper bound in seconds, requests at or under it), ascending; the last bound is infinite."""
        found = ((_BUCKET.fullmatch(name), value) for name, value in self.samples.items())
        return sorted((float(match[1]), value) for match, value in found if match is not None)


def hit_rate(now: Snapshot, earlier: Snapshot | None = None) -> float | None:
    """Found / looked-up tokens since the start, or since an earlier snapshot; None if nothing was looked up."""
    queries, hits = (
        now[name] - (0.0 if earlier is None else earlier[name])
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")
    )
    return hits / queries if queries > 0 else None


def rate(name: str, now: Snapshot, earlier: Snapshot) -> float:
    """What a counter rose by in a second."""
    seconds = now.taken_s - earlier.taken_s
    return (now[name] - earlier[name]) / seconds if seconds > 0 else 0.0


def ttft_percentile(share: float, now: Snapshot, earlier: Snapshot | None = None) -> float | None:
    """Seconds, interpolated within its bucket; the lower bound of the last bucket at most. None without requests."""
    before = {} if earlier is None else dict(earlier.ttft_buckets)
    counts = [(bound, count - before.get(bound, 0.0)) for bound, count in now.ttft_buckets]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def snapshot_of(server: RunningServer) -> Snapshot:
    """Raises ServerUnreachableError, ConfigError if the server wants another key."""
    status, text = server.get("/metrics")
    if status in (401, 403):
        raise ConfigError(f"{server.url} shows its metrics to admins only ({status}): give an admin's --api-key")
    samples = parse_samples(text.splitlines()) if status == 200 else {}
    if not samples:
        raise ServerUnreachableError(f"{server.url}/metrics answers {status} and is no Anaphora server: check the URL")
    status, text = server.get("/debug/prefixes")
    return Snapshot(time.monotonic(), samples, _prefixes(text) if status == 200 else None)


def parse_samples(lines: Iterable[str]) -> dict[str, float]:
    """Our samples of Prometheus' text format; lines of other kinds are left out."""
    samples = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if not name.startswith(_PREFIX):
            continue
        try:
            samples[name.removeprefix(_PREFIX)] = float(value)
        except ValueError:
            continue
    return samples


def _prefixes(text: str) -> list[dict[str, Any]] | None:
    try:
        rows = json.loads(text)["prefixes"]
        return [{"hash": str(row["hash"])} | {name: int(row[name]) for name in _PREFIX_COUNTS} for row in rows]
    except (ValueError, KeyError, TypeError):
        return None


_PREFIX_COUNTS = ("num_tokens", "num_requests", "num_hit_tokens")
