"""Where the time of a sequential LRU replay goes: microseconds a request for each verb of the cache manager.

    python bench/replay.py TRACE ... [--blocks 1k,10k] [--requests 2500] [--rounds 12]

Of each verb of each request the least of all rounds counts, so a neighbour who is busy for a moment hardly matters.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

from anaphora.core import CacheManager, Request
from anaphora.sampling_params import SamplingParams
from anaphora.sim.chain import TraceChain, replayed_requests
from anaphora.sim.mooncake import read_mooncake
from anaphora.sim.trace import Trace

VERBS = ("chain", "look up", "admit", "stage", "commit", "free")


class LengthOnlyRequest(Request):
    """As in anaphora.sim.sequential."""

    __slots__ = ("num_tokens",)

    num_tokens: int


def replay(trace: Trace, num_blocks: int) -> tuple[list[list[float]], int]:
    """(of each request the seconds of each verb, full prompt blocks looked up)."""
    cache = CacheManager(num_blocks, trace.block_size, min_trail_blocks=num_blocks + 1)  # as in sim.sequential
    request = LengthOnlyRequest("replayed", [0], SamplingParams(max_tokens=1))
    clock = time.perf_counter
    rows, num_looked_up = [], 0
    for length, _, block_ids in replayed_requests(trace, trace.block_size, with_outputs=False):
        if length > cache.capacity_tokens:
            continue
        times = [clock()]
        request.num_tokens = length
        request.chain = TraceChain(block_ids, trace.block_size)
        times.append(clock())
        hit = cache.look_up(request)
        times.append(clock())
        cache.admit(request, hit)
        times.append(clock())
        staged = cache.stage(request, length)
        times.append(clock())
        cache.commit(staged)
        times.append(clock())
        cache.free(request)
        times.append(clock())
        rows.append([stop - start for start, stop in pairwise(times)])
        num_looked_up += length // trace.block_size
    return rows, num_looked_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--blocks", default="1k,10k")
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    for path in options.traces:
        trace = read_mooncake(path)
        short = Trace(trace.name, trace.block_size, trace.requests[: options.requests])
        for size in options.blocks.split(","):
            num_blocks = int(size.removesuffix("k")) * (1000 if size.endswith("k") else 1)
            least, num_looked_up = replay(short, num_blocks)
            for _ in range(options.rounds - 1):
                rows, _ = replay(short, num_blocks)
                least = [list(map(min, row, before)) for row, before in zip(rows, least, strict=True)]
            seconds = [sum(column) for column in zip(*least, strict=True)]
            parts = "  ".join(
                f"{verb} {each / len(least) * 1e6:.2f}" for verb, each in zip(VERBS, seconds, strict=True)
            )
            total = sum(seconds)
            print(f"{path.stem:24} {num_blocks:7,}  µs/request: {parts}  sum {total / len(least) * 1e6:.1f}  ", end="")
            print(
                f"({num_looked_up / len(least):.1f} blocks; {num_looked_up / total / 1e6:.2f} M look-ups/s)", flush=True
            )


if __name__ == "__main__":
    main()
