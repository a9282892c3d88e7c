"""What each eviction policy gains over LRU, and what it costs: hit rates in points, microseconds of CPU a block.

    python bench/policies.py [TRACE ...] [--blocks 1k,2k] [--policies lfu,learnt-hazard] [--requests N] [--json]

Without traces: made-up traffic with a seed, for pools of a 32nd to a half of its distinct blocks. Sequential replay
through the engine's own cache manager. A policy's cost is the time inside its own calls for each block looked up; the
replay's is all of another one, in which nobody reads a clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from anaphora.core.eviction import POLICIES, EvictionPolicy
from anaphora.core.prefix_index import PrefixIndex
from anaphora.sim.mooncake import read_mooncake
from anaphora.sim.sequential import replay_sequential
from anaphora.sim.trace import Trace, TraceRequest
from anaphora.sim.workloads import KINDS, generate_trace

SHARES = (32, 16, 8, 4, 2)
BLOCK_SIZE = 16


class Timed:
    """A policy, and the seconds spent in its calls."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.seconds = 0.0
        self._policy = policy
        self.put, self.remove = self._timed(policy.put), self._timed(policy.remove)
        self.take, self.discard = self._timed(policy.take), self._timed(policy.discard)
        self.pop_all = policy.pop_all

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.process_time()
            result = call(*arguments)
            self.seconds += time.process_time() - begin
            return result

        return timed

    def __len__(self) -> int:
        return len(self._policy)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._policy)


@dataclass(frozen=True)
class Row:
    trace: str
    num_blocks: int
    policy: str
    hit_rate: float
    gain: float
    policy_us: float
    replay_us: float


def measure(trace: Trace, num_blocks: int, policies: Sequence[str]) -> Iterator[Row]:
    lru = 0.0
    for name in dict.fromkeys(("lru", *policies)):
        made: list[Timed] = []

        def make(index: PrefixIndex, name: str = name, made: list[Timed] = made) -> EvictionPolicy:
            made.append(Timed(POLICIES[name](index)))
            return made[0]  # type: ignore[return-value]

        result = replay_sequential(trace, num_blocks, trace.block_size, make, with_outputs=trace.has_output_ids)
        gc.collect()
        begin = time.process_time()
        replay_sequential(trace, num_blocks, trace.block_size, name, with_outputs=trace.has_output_ids)
        seconds = time.process_time() - begin
        lru = result.hit_rate if name == "lru" else lru
        looked_up = max(1, result.num_blocks_looked_up)
        yield Row(
            trace.name,
            num_blocks,
            name,
            round(100 * result.hit_rate, 2),
            round(100 * (result.hit_rate - lru), 2),
            round(made[0].seconds / looked_up * 1e6, 2),
            round(seconds / looked_up * 1e6, 2),
        )


# -- made-up traffic ---------------------------------------------------------------------------------------------------


def shifted(trace: Trace, offset: int) -> list[TraceRequest]:
    """The same requests about other contents."""
    return [
        replace(
            request,
            hash_ids=tuple(block_id + offset for block_id in request.hash_ids),
            output_hash_ids=tuple(block_id + offset for block_id in request.output_hash_ids),
        )
        for request in trace.requests
    ]


def plain(name: str, prompts: Sequence[tuple[int, int]]) -> Trace:
    """prompts: (which document, how many blocks); a document's blocks are its own."""
    width = max(count for _, count in prompts) + 1
    requests = [
        TraceRequest(float(number), count * BLOCK_SIZE + 1, 1, tuple(range(which * width, which * width + count + 1)))
        for number, (which, count) in enumerate(prompts)
    ]
    return Trace(name, BLOCK_SIZE, requests)


def hard_ones(num_requests: int, seed: int) -> Iterator[Trace]:
    """What fools a policy that trusts the past: loops, scans, popularity alone, and traffic that changes."""
    draw = Random(seed)
    loop = [(number % 200, 12) for number in range(num_requests)]
    yield plain("loop over 200 documents", loop)
    zipf = draw.choices(range(2000), [1 / (rank + 1) for rank in range(2000)], k=num_requests)
    lengths = [draw.randrange(2, 40) for _ in range(2000)]
    yield plain("zipf", [(which, lengths[which]) for which in zipf])
    yield plain("uniform", [(which, lengths[which]) for which in draw.choices(range(1000), k=num_requests)])
    scan = [
        (10_000 + number, 30) if number % 3 == 0 else (zipf[number], lengths[zipf[number]])
        for number in range(num_requests)
    ]
    yield plain("zipf and a scan", scan)
    drift = [(which + number // 4 * 1, lengths[which]) for number, which in enumerate(zipf)]
    yield plain("zipf that drifts", drift)
    kinds = [generate_trace(replace(kind, requests=num_requests // 4, seed=seed)) for kind in KINDS]
    phases = [request for number, trace in enumerate(kinds) for request in shifted(trace, number * 10**8)]
    yield Trace("phases of every kind", kinds[0].block_size, phases)
    mixed = [
        request
        for each in zip(*(shifted(trace, number * 10**8) for number, trace in enumerate(kinds)), strict=False)
        for request in each
    ]
    yield Trace("every kind at once", kinds[0].block_size, mixed)


def made_up(num_requests: int, seed: int) -> Iterator[Trace]:
    for kind in KINDS:
        yield generate_trace(replace(kind, requests=num_requests, seed=seed))
    yield from hard_ones(num_requests, seed)


def number(text: str) -> int:
    return int(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--blocks", default="1k,2k,5k,10k")
    parser.add_argument("--policies", default="learnt-hazard")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    policies = list(POLICIES) if options.policies == "all" else options.policies.split(",")
    traces = map(read_mooncake, options.traces) if options.traces else made_up(options.requests, options.seed)
    for trace in traces:
        distinct = trace.num_distinct_blocks(trace.block_size, with_outputs=trace.has_output_ids)
        low = trace.max_request_blocks(trace.block_size)
        if options.traces:
            sizes = [number(size) for size in options.blocks.split(",")]
        else:
            sizes = sorted({max(low, distinct // share) for share in SHARES})
        for size in sizes:
            for row in measure(trace, size, policies):
                if options.json:
                    print(json.dumps(vars(row)), flush=True)
                elif row.policy == "lru":
                    print(f"{row.trace[:28]:28} {size:7,}  lru {row.hit_rate:6.2f}", end="")
                    print(f" ({row.policy_us:.2f} of {row.replay_us:.2f} us)", end="", flush=True)
                else:
                    print(f"   {row.policy} {row.gain:+6.2f} ({row.policy_us:.2f} of {row.replay_us:.2f} us)", end="")
            if not options.json:
                print(flush=True)


if __name__ == "__main__":
    main()
