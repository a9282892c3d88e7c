"""What the control plane alone costs: microseconds per block and per request, one core, no model.

    python bench/control_plane.py [--quick] [--json] [--beside vllm]

For each prompt length, pool size and hit share: hash (from packed tokens, and packing a Python list), look-up,
admission (touch + allocate), stage + commit, free. Medians over repeats, with the spread of the total.

--beside vllm: instead of all that, whole requests through vLLM's own block manager in turn with ours, in a Python that
has vLLM.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence

import beside

from anaphora.core import BlockPool, CacheManager, Request
from anaphora.core.hashing import ExtraKey, ExtraKeyKind, lora_key, pack_tokens, salt_key
from anaphora.sampling_params import SamplingParams

BLOCK_SIZE = 16
PARAMS = SamplingParams(max_tokens=1)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(49152) for _ in range(num_tokens)]


def extra_keys(num_tokens: int) -> list[ExtraKey]:
    """A salt, an adapter, and an image that spans eight blocks in each 32."""
    num_blocks = num_tokens // BLOCK_SIZE
    images = [ExtraKey(ExtraKeyKind.MULTIMODAL, bytes(40), index) for index in range(num_blocks) if index % 32 < 8]
    return [salt_key("bench"), lora_key("ab" * 32), *images]


def one_request(cache: CacheManager, name: str, tokens: list[int], keys: Sequence[ExtraKey] = ()) -> dict[str, float]:
    """The life of one request in the cache, each part timed. Seconds."""
    request = Request(name, tokens, PARAMS, extra_keys=keys)
    parts = {"pack": timed(lambda: pack_tokens(tokens))}
    parts["hash"] = timed(lambda: cache.register(request))
    start = time.perf_counter()
    hit = cache.look_up(request)
    parts["look_up"] = time.perf_counter() - start
    parts["allocate"] = timed(lambda: cache.admit(request, hit))
    start = time.perf_counter()
    cache.commit(cache.stage(request, request.num_tokens))
    parts["commit"] = time.perf_counter() - start
    parts["free"] = timed(lambda: cache.free(request))
    parts["hit_blocks"] = float(len(hit.blocks))
    return parts


def measure(
    num_tokens: int, num_blocks: int, hit: bool, full_pool: bool, repeats: int, keyed: bool = False
) -> dict[str, float | int | str]:
    cache = CacheManager(num_blocks, BLOCK_SIZE, root=bytes(32))
    if full_pool:  # every block cached, so that each allocation evicts
        fill = min(100_000, num_blocks * BLOCK_SIZE)
        for number in range(-(-num_blocks * BLOCK_SIZE // fill)):
            one_request(cache, "fill", prompt(10**6 + number, fill))
    tokens, keys = prompt(1, num_tokens), extra_keys(num_tokens) if keyed else []
    if hit:
        one_request(cache, "warm", tokens, keys)
    rows = []
    for number in range(repeats):
        text = list(tokens) if hit else prompt(2 + number, num_tokens)
        gc.collect()
        rows.append(one_request(cache, "r", text, keys))
    assert all(row["hit_blocks"] == ((num_tokens - 1) // BLOCK_SIZE if hit else 0) for row in rows)
    num = num_tokens // BLOCK_SIZE
    parts = ("pack", "hash", "look_up", "allocate", "commit", "free")
    result: dict[str, float | int | str] = {
        "prompt_tokens": num_tokens,
        "pool_blocks": num_blocks,
        "case": ("hit" if hit else "miss")
        + (", pool full of cached blocks" if full_pool else "")
        + (", extra keys" if keyed else ""),
    }
    for part in parts:
        result[f"{part}_us_per_block"] = statistics.median(row[part] for row in rows) / num * 1e6
    totals = [sum(row[part] for part in parts) * 1e6 for row in rows]
    result["request_us"] = statistics.median(totals)
    result["request_us_min"], result["request_us_max"] = min(totals), max(totals)
    result["packed_request_us"] = statistics.median(
        total - row["pack"] * 1e6 for total, row in zip(totals, rows, strict=True)
    )
    return result


def calibration() -> float:
    """Microseconds of one bare SHA-256 of a block's message (109 bytes) here and now: what hashing cannot go below."""
    data = bytes(109)
    rows = [timed(lambda: [hashlib.sha256(data).digest() for _ in range(10_000)]) for _ in range(5)]
    return statistics.median(rows) / 10_000 * 1e6


def construction(num_blocks: int) -> dict[str, float | int]:
    seconds = statistics.median(timed(lambda: BlockPool(num_blocks)) for _ in range(5))
    tracemalloc.start()
    pool = BlockPool(num_blocks)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"pool_blocks": pool.num_blocks, "construct_s": seconds, "bytes_per_block": size / num_blocks}


def growing_prompt(num_tokens: int, chunk: int = 512) -> dict[str, float | int]:
    """A prompt computed in chunks: microseconds per block over all its steps must not depend on its length."""
    cache = CacheManager(num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, root=bytes(32))
    request = Request("long", prompt(3, num_tokens), PARAMS)
    start = time.perf_counter()
    cache.register(request)
    cache.admit(request, cache.look_up(request))
    for computed in range(chunk, num_tokens + chunk, chunk):
        cache.commit(cache.stage(request, min(computed, num_tokens)))
    cache.free(request)
    return {"prompt_tokens": num_tokens, "us_per_block": (time.perf_counter() - start) / (num_tokens // 16) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small pools and few repeats")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--beside", choices=("vllm",), help="time this engine's control plane in turn with ours")
    args = parser.parse_args()
    repeats = 5 if args.quick else 21
    if args.beside is not None:
        compared = beside.compare(beside.load_peer(args.beside), 10_000, BLOCK_SIZE, repeats)
        if args.json:
            print(json.dumps(list(compared), indent=2))
        else:
            beside.print_rows(args.beside, compared)
        return
    pools = (10_000,) if args.quick else (10_000, 1_000_000)
    rows = [
        measure(num_tokens, num_blocks, hit, full, repeats, keyed)
        for num_blocks in pools
        for num_tokens in (1_000, 8_000, 100_000)
        for hit, full, keyed in (
            (False, False, False),
            (False, True, False),
            (True, False, False),
            (False, False, True),
            (True, False, True),
        )
    ]
    sha256_us = calibration()
    pool_rows = [construction(num_blocks) for num_blocks in (10_000, 1_000_000)]
    growth = [growing_prompt(num_tokens) for num_tokens in (10_000, 100_000, 1_000_000)]
    if args.json:
        print(
            json.dumps(
                {"sha256_us": sha256_us, "requests": rows, "construction": pool_rows, "growth": growth}, indent=2
            )
        )
        return
    print("prompt      pool case                        µs/block: pack  hash  look-up  allocate  commit  free", end="")
    print("  µs/request (min-max), without packing")
    print(f"(one bare SHA-256 of a block's message: {sha256_us:.2f} µs on this machine in this minute)")
    for row in rows:
        print(
            f"{row['prompt_tokens']:>7} {row['pool_blocks']:>8} {row['case']:<35}"
            f"{row['pack_us_per_block']:>7.2f}{row['hash_us_per_block']:>6.2f}{row['look_up_us_per_block']:>9.3f}"
            f"{row['allocate_us_per_block']:>10.2f}{row['commit_us_per_block']:>8.2f}{row['free_us_per_block']:>6.2f}"
            f"{row['request_us']:>12.0f} ({row['request_us_min']:.0f}-{row['request_us_max']:.0f})"
            f"{row['packed_request_us']:>8.0f}"
        )
    for pool in pool_rows:
        print(
            f"pool of {pool['pool_blocks']:>9,} blocks: {pool['construct_s'] * 1e3:.1f} ms, "
            f"{pool['bytes_per_block']:.0f} bytes a block"
        )
    for grown in growth:
        print(f"prompt of {grown['prompt_tokens']:>9,} tokens in chunks of 512: {grown['us_per_block']:.2f} µs a block")


if __name__ == "__main__":
    main()
