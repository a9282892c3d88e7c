"""Ours beside another engine's control plane: the same prompts in one process, round by round in turn.

A round is the life of one request from a list of token ids on: made and hashed, looked up, admitted, its blocks made
findable, freed. Imported by `bench/control_plane.py`.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from anaphora.core import CacheManager, Request
from anaphora.core.hashing import pack_tokens
from anaphora.core.hit import Hit
from anaphora.sampling_params import SamplingParams

PARTS = ("hash", "look-up", "allocate", "free")
CASES = {"miss": "miss", "evict": "miss, every allocation evicts", "hit": "hit"}
_VOCABULARY = 49_152


class ControlPlane(Protocol):
    """What is timed. A request is made hashed; what is allocated is findable when `allocate` returns."""

    def make_request(self, name: str, tokens: list[int]) -> Any: ...
    def look_up(self, request: Any) -> Any: ...
    def allocate(self, request: Any, hit: Any) -> None: ...
    def free(self, request: Any) -> None: ...
    def reset(self) -> None: ...


class OurCache:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._cache = CacheManager(num_blocks, block_size, root=bytes(32))
        self._params = SamplingParams(max_tokens=1)

    def make_request(self, name: str, tokens: list[int]) -> Request:
        request = Request(name, pack_tokens(tokens), self._params)  # both engines have checked the ids before
        self._cache.register(request)
        return request

    def look_up(self, request: Request) -> Hit:
        return self._cache.look_up(request)

    def allocate(self, request: Request, hit: Hit) -> None:
        self._cache.admit(request, hit)
        self._cache.commit(self._cache.stage(request, request.num_tokens))

    def free(self, request: Request) -> None:
        self._cache.free(request)

    def reset(self) -> None:
        self._cache.reset()


def load_peer(name: str) -> Callable[[int, int], ControlPlane]:
    """What makes the peer's cache of so many blocks of a size. Raises SystemExit if it is not installed here."""
    try:
        from peers.vllm_blocks import VllmCache
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"--beside {name} needs {name} in this Python, and {error.name!r} is missing. Our core is the standard "
            f"library alone, so run this file in {name}'s environment: "
            f"PYTHONPATH=. {name}/bin/python bench/control_plane.py --beside {name}"
        ) from None
    return VllmCache


def life(cache: ControlPlane, tokens: list[int]) -> list[float]:
    """Seconds of each part."""
    clock = time.perf_counter
    begin = clock()
    request = cache.make_request("r", tokens)
    made = clock()
    hit = cache.look_up(request)
    looked = clock()
    cache.allocate(request, hit)
    allocated = clock()
    cache.free(request)
    return [made - begin, looked - made, allocated - looked, clock() - allocated]


def _prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(_VOCABULARY), k=num_tokens)


def compare(
    make_peer: Callable[[int, int], ControlPlane], num_blocks: int, block_size: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each prompt length and case: medians of microseconds a block, ours and theirs, and the ratio."""
    for num_tokens in (1_000, 8_000, 100_000):
        for case, words in CASES.items():
            caches: list[ControlPlane] = [OurCache(num_blocks, block_size), make_peer(num_blocks, block_size)]
            gc.collect()
            gc.freeze()  # as engines do: what was imported is not walked through in the middle of a round
            if case == "evict":
                for number in range(-(-num_blocks * block_size // 100_000)):
                    for cache in caches:
                        life(cache, _prompt(10**6 + number, 100_000))
            seconds: list[list[list[float]]] = [[], []]
            for number in range(rounds + 1):
                tokens = _prompt(0 if case == "hit" else number, num_tokens)
                for side in (0, 1) if number % 2 else (1, 0):
                    if case == "miss":
                        caches[side].reset()
                    row = life(caches[side], list(tokens))
                    if number:  # the first one fills, or warms up
                        seconds[side].append(row)
            gc.unfreeze()
            yield _row(num_tokens, words, num_tokens // block_size, seconds)


def _row(num_tokens: int, case: str, num_blocks: int, seconds: list[list[list[float]]]) -> dict[str, Any]:
    ours, theirs = (
        dict(zip((*PARTS, "all"), (statistics.median(column) / num_blocks * 1e6 for column in columns), strict=True))
        for columns in ([*zip(*rows, strict=True), [sum(row) for row in rows]] for rows in seconds)
    )
    ratios = [sum(mine) / sum(other) for mine, other in zip(*seconds, strict=True)]
    return {
        "prompt_tokens": num_tokens,
        "case": case,
        "ours_us_per_block": ours,
        "theirs_us_per_block": theirs,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def print_rows(name: str, rows: Iterator[dict[str, Any]]) -> None:
    print(f"µs a block, medians: ours / {name}'s; last, ours ÷ {name}'s of a whole request (least - most of a round)")
    print(f"{'prompt':>7} {'case':<30}" + "".join(f"{part:>15}" for part in (*PARTS, "all")))
    for row in rows:
        ours, theirs = row["ours_us_per_block"], row["theirs_us_per_block"]
        parts = "".join(f"{f'{ours[part]:.2f} / {theirs[part]:.2f}':>15}" for part in (*PARTS, "all"))
        print(
            f"{row['prompt_tokens']:>7} {row['case']:<30}{parts}"
            f"{row['ratio']:>8.2f} ({row['ratio_min']:.2f} - {row['ratio_max']:.2f})",
            flush=True,
        )
