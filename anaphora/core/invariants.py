"""The equations that hold between any two calls of the scheduler. Code, so that tests and debug runs can check them.

Raises InvariantError with every equation that is broken. Costs time in proportion to the pool: not for every step of a
production run.
"""

from __future__ import annotations

from collections import Counter

from anaphora.core.cache_manager import CacheManager
from anaphora.core.ids import NULL_BLOCK, BlockId
from anaphora.core.scheduler import Scheduler


class InvariantError(AssertionError):
    """A bug in the control plane."""


def check_cache(cache: CacheManager) -> None:
    """Pool, free queue, index and tables agree."""
    pool, index = cache.pool, cache.pool.index
    broken: list[str] = []

    def claim(holds: bool, text: str) -> None:
        if not holds:
            broken.append(text)

    queue = list(pool.free_queue)
    queued = set(queue)
    blank = set(queue[: pool.free_queue.num_blank])
    owners = Counter(block for table in cache.tables.values() for block in table if block != NULL_BLOCK)
    claim(len(queue) == len(queued), "a block is in the free queue twice")
    claim(NULL_BLOCK not in queued and pool.ref_counts[NULL_BLOCK] == 0, "the null block is queued or owned")
    claim(index.hashes[NULL_BLOCK] is None, "the null block has a hash")
    for block in map(BlockId, range(1, pool.num_blocks + 1)):
        refs = pool.ref_counts[block]
        claim(refs == owners[block], f"block {block}: ref count {refs}, in {owners[block]} tables")
        claim((refs == 0) == (block in queued), f"block {block}: ref count {refs}, queued: {block in queued}")
        claim(block not in blank or index.hashes[block] is None, f"block {block} is queued as blank and has a hash")
        claim(
            block not in queued or block in blank or index.hashes[block] is not None,
            f"block {block} is queued as cached and has no hash",
        )
    claim(len(queue) + sum(1 for refs in pool.ref_counts if refs) == pool.num_blocks, "free + live != total")
    broken += index.inconsistencies()
    broken += pool.pins.inconsistencies()
    for request_id, table in cache.tables.items():
        claim(len(set(table)) == len(table), f"{request_id!r} holds a block twice")
    for block_hash in index.copies:
        blocks = index.blocks_of(block_hash)
        free = [block for block in blocks if block in queued]
        claim(len(free) <= 1, f"one content is free more than once, in blocks {free}")
        claim(len({index.lineages[block] for block in blocks}) == 1, f"copies {blocks} are not of one beginning")
    if broken:
        raise InvariantError("; ".join(broken))


def check_scheduler(scheduler: Scheduler) -> None:
    """As check_cache, and every table belongs to a running request that it covers; between steps nothing is pending."""
    check_cache(scheduler.cache)
    broken = scheduler.inconsistencies()
    if broken:
        raise InvariantError("; ".join(broken))
