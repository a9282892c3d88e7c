"""The equations that hold between any two calls of the scheduler. Code, so that tests and debug runs can check them.

Raises InvariantError with every equation that is broken. Costs time in proportion to the pool: not for every step of a
production run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from anaphora.core.block_pool import BlockPool
from anaphora.core.cache_manager import CacheManager
from anaphora.core.ids import NO_LINEAGE, NULL_BLOCK, BlockId
from anaphora.core.scheduler import Scheduler
from anaphora.core.side_group import SideGroup


class InvariantError(AssertionError):
    """A bug in the control plane."""


def check_cache(cache: CacheManager) -> None:
    """Pools, free queues, indexes, checkpoints and tables agree."""
    spine_tables = list(cache.tables.values())
    side_tables = [table.blocks for side in cache.sides for table in side.tables.values()]
    if cache.spine is cache.pool:
        broken = _broken_pool(cache.pool, spine_tables + side_tables)
    else:
        broken = _broken_pool(cache.pool, side_tables) + _broken_pool(cache.spine, spine_tables)
    alive = cache.spine.index.committed_lineages
    broken += cache.pool.sides.inconsistencies(alive)
    if cache.checkpoints is not None:
        broken += cache.checkpoints.inconsistencies(alive)
    for side in cache.sides:
        broken += _broken_side(cache, side)
    if broken:
        raise InvariantError("; ".join(broken))


def _broken_pool(pool: BlockPool, tables: Iterable[Sequence[BlockId]]) -> list[str]:
    index = pool.index
    broken: list[str] = []

    def claim(holds: bool, text: str) -> None:
        if not holds:
            broken.append(text)

    tables = list(tables)
    queue = list(pool.free_queue)
    queued = set(queue)
    blank = set(queue[: pool.free_queue.num_blank])
    owners = Counter(block for table in tables for block in table if block != NULL_BLOCK)
    claim(len(queue) == len(queued), "a block is in the free queue twice")
    claim(len(queue) == len(pool.free_queue) == pool.num_free, f"{len(queue)} blocks are free, counted {pool.num_free}")
    claim(NULL_BLOCK not in queued and pool.ref_counts[NULL_BLOCK] == 0, "the null block is queued or owned")
    claim(index.hashes[NULL_BLOCK] is None, "the null block has a hash")
    for block in map(BlockId, range(1, pool.num_blocks + 1)):
        refs, has_hash = pool.ref_counts[block], index.hashes[block] is not None
        if refs != owners[block]:
            broken.append(f"block {block}: ref count {refs}, in {owners[block]} tables")
        if (refs == 0) != (block in queued):
            broken.append(f"block {block}: ref count {refs}, queued: {block in queued}")
        if block in queued and has_hash == (block in blank):
            broken.append(f"block {block} is queued as {'blank' if has_hash else 'cached'}, has a hash: {has_hash}")
    claim(len(queue) + sum(1 for refs in pool.ref_counts if refs) == pool.num_blocks, "free + live != total")
    broken += index.inconsistencies()
    broken += pool.pins.inconsistencies()
    for table in tables:
        held = [block for block in table if block != NULL_BLOCK]
        claim(len(set(held)) == len(held), f"a table holds a block twice: {held}")
        is_blank = [index.lineages[block] <= NO_LINEAGE for block in held]
        claim(is_blank == sorted(is_blank), f"what is findable of a table is no beginning of it: {held}")
    for block_hash in index.copies:
        blocks = index.blocks_of(block_hash)
        free = [block for block in blocks if block in queued]
        claim(len(free) <= 1, f"one content is free more than once, in blocks {free}")
        claim(len({index.lineages[block] for block in blocks}) == 1, f"copies {blocks} are not of one beginning")
    return broken


def _broken_side(cache: CacheManager, side: SideGroup) -> list[str]:
    pool, number = cache.pool, side.number
    broken = []
    if side.tables.keys() != cache.tables.keys():
        broken.append(f"side group {number} has tables for {sorted(side.tables)}, the spine for {sorted(cache.tables)}")
    for request_id, table in side.tables.items():
        if [block == NULL_BLOCK for block in table.blocks] != [i < table.first for i in range(len(table.blocks))]:
            broken.append(f"side group {number}: the null entries of {request_id!r} are not its first {table.first}")
        if len(table.blocks) > len(cache.table(request_id)):
            broken.append(f"side group {number}: the table of {request_id!r} is longer than the spine's")
    if not side.promises.keys() <= side.tables.keys():
        broken.append(f"side group {number} has promised blocks to {sorted(side.promises.keys() - side.tables.keys())}")
    live = {block for table in side.tables.values() for block in table.blocks if block != NULL_BLOCK}
    cached = [
        block
        for block in map(BlockId, range(1, pool.num_blocks + 1))
        if pool.sides.is_labelled(block) and pool.sides.group_of(block) == number and not pool.ref_counts[block]
    ]
    counted = pool.sides.num_live[number], pool.sides.num_cached[number]
    if counted != (len(live), len(cached)):
        broken.append(
            f"side group {number} holds {len(live)} live and {len(cached)} cached blocks, counts say {counted}"
        )
    return broken


def check_scheduler(scheduler: Scheduler) -> None:
    """As check_cache, and every table belongs to a running request that it covers; between steps nothing is pending."""
    check_cache(scheduler.cache)
    broken = scheduler.inconsistencies()
    for side in scheduler.cache.sides:
        most = side.most_blocks_between_steps
        for request_id, table in side.tables.items():
            if most is not None and table.num_held > most:
                broken.append(f"side group {side.number}: {request_id!r} holds {table.num_held} blocks, not {most}")
    if broken:
        raise InvariantError("; ".join(broken))
