"""An LRU prefix cache in a dozen lines, for comparison: ids in an OrderedDict, one request after the other."""

from __future__ import annotations

from collections import OrderedDict


def brute_force_hits(requests: list[tuple[int, list[int]]], capacity: int, block_size: int) -> list[int]:
    """(length, ids) of each request -> its hit tokens; -1 where the pool is too small for it."""
    cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
    hits = []
    for length, ids in requests:
        needed, full, most = -(-length // block_size), ids[: length // block_size], (length - 1) // block_size
        if needed > capacity:
            hits.append(-1)
            continue
        found = 0
        while found < most and full[found] in cached:
            del cached[full[found]]  # owned now
            found += 1
        while len(cached) + needed > capacity:
            cached.popitem(last=False)
        for block_id in reversed(full):  # the tail is released first
            cached.pop(block_id, None)
            cached[block_id] = None
        hits.append(found * block_size)
    return hits
