"""The five verbs: exact block ids, orders, ref counts and what is findable after each."""

from __future__ import annotations

import pytest
from core_world import make_chain

from anaphora.core.block_pool import BlockPool
from anaphora.core.hashing import BlockChain
from anaphora.core.ids import BlockId
from anaphora.errors import ConfigError

A = make_chain([1, 2, 3, 4, 5, 6], 2)  # three blocks
B = make_chain([1, 2, 3, 4, 9, 9], 2)  # parts from A in its third block


def cached_table(pool: BlockPool, chain: BlockChain) -> list[BlockId]:
    """A table that holds `chain`, committed, still owned."""
    table = pool.allocate(len(chain.hashes))
    assert pool.stage(table, chain, 0, None) == len(table)
    pool.commit(table)
    return table


def find(pool: BlockPool, chain: BlockChain) -> list[BlockId]:
    return pool.index.find(chain, len(chain.hashes))[0]


def test_block_ids_start_at_one_and_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(3)
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.ref_counts == [0, 1, 1, 1]
    assert (pool.num_free, pool.num_live) == (0, 3)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one usable block"):
        BlockPool(0)


def test_free_releases_the_tail_first_so_that_children_are_evicted_before_their_parents() -> None:
    pool = BlockPool(4)
    pool.free(cached_table(pool, A))  # blocks 1, 2, 3; block 4 is blank
    assert list(pool.free_queue) == [4, 3, 2, 1]
    assert find(pool, A) == [1, 2, 3]
    assert pool.allocate(2) == [4, 3]
    assert find(pool, A) == [1, 2]
    assert pool.allocate(1) == [2]
    assert find(pool, A) == [1]


def test_eviction_is_lazy_and_counted_when_another_takes_the_block() -> None:
    pool = BlockPool(3)
    pool.free(cached_table(pool, A))
    assert pool.num_evicted == 0
    assert find(pool, A) == [1, 2, 3]
    pool.allocate(2)
    assert pool.num_evicted == 2
    assert find(pool, A) == [1]


def test_an_allocated_block_is_in_no_index_before_it_is_given_out() -> None:
    pool = BlockPool(3)
    pool.free(cached_table(pool, A))
    pool.allocate(3)
    assert find(pool, A) == []
    assert pool.index.hashes == [None] * 4
    assert len(pool.index) == 0


def test_blank_blocks_are_reused_before_any_cached_one() -> None:
    pool = BlockPool(5)
    table = cached_table(pool, A)
    blank = pool.allocate(2)
    pool.free(table)
    pool.free(blank)  # released last, and still the first to go
    assert list(pool.free_queue) == [4, 5, 3, 2, 1]


def test_touch_takes_found_blocks_out_of_the_queue_and_the_last_owner_puts_them_back() -> None:
    pool = BlockPool(3)
    pool.free(cached_table(pool, A))
    pool.touch([BlockId(1), BlockId(2)])
    assert list(pool.free_queue) == [3]
    pool.touch([BlockId(1)])
    assert pool.ref_counts == [0, 2, 1, 0]
    pool.free([BlockId(1), BlockId(2)])
    assert pool.ref_counts == [0, 1, 0, 0]
    assert list(pool.free_queue) == [3, 2]
    pool.free([BlockId(1)])
    assert list(pool.free_queue) == [3, 2, 1]


def test_the_null_block_in_a_table_is_neither_freed_nor_queued() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    pool.free([BlockId(0), block])
    assert pool.ref_counts == [0, 0, 0]
    assert list(pool.free_queue) == [1, 2]


def test_two_blocks_of_one_content_are_both_kept_while_both_have_owners() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(3)
    for table in (first, second):
        pool.stage(table, A, 0, None)
        pool.commit(table)
    assert pool.index.blocks_of(A.hashes[0]) == [1, 4]
    assert (pool.index.num_committed, pool.index.num_duplicates, len(pool.index)) == (6, 3, 6)
    assert find(pool, A) == [1, 2, 3]


def test_a_released_copy_becomes_blank_while_another_owner_keeps_the_content_findable() -> None:
    pool = BlockPool(6)
    first, second = cached_table(pool, A), cached_table(pool, A)
    pool.free(first)
    assert pool.free_queue.num_cached == 0
    assert list(pool.free_queue) == [1, 2, 3]
    assert find(pool, A) == second == [4, 5, 6]
    pool.free(second)
    assert list(pool.free_queue) == [1, 2, 3, 6, 5, 4]
    assert find(pool, A) == [4, 5, 6]


def test_of_two_free_copies_the_one_released_last_stays_and_the_other_becomes_blank() -> None:
    pool = BlockPool(7)
    first, second = pool.allocate(3), pool.allocate(3)
    pool.stage(first, A, 0, None)
    pool.commit(first)
    pool.free(first)  # cached before the second one is committed
    pool.stage(second, A, 0, None)
    pool.commit(second)
    assert list(pool.free_queue) == [7, 3, 2, 1]
    pool.free(second)
    assert list(pool.free_queue) == [1, 2, 3, 7, 6, 5, 4]
    assert find(pool, A) == [4, 5, 6]
    assert pool.index.copies == {}
    assert pool.num_evicted == 0


def test_a_surviving_copy_keeps_the_children_of_the_other_one_findable() -> None:
    pool = BlockPool(6)
    short = cached_table(pool, make_chain([1, 2], 2))  # block 1
    full = cached_table(pool, A)  # blocks 2, 3, 4: another copy of the same beginning, and what follows it
    pool.free(full)
    assert find(pool, A) == [1, 3, 4]
    pool.free(short)
    assert list(pool.free_queue) == [2, 5, 6, 4, 3, 1]  # the parent is the last one to go


def test_a_shared_beginning_is_freed_with_its_last_owner() -> None:
    pool = BlockPool(6)
    first = cached_table(pool, A)
    pool.touch(first[:2])
    second = [*first[:2], *pool.allocate(1)]
    assert pool.stage(second[2:], B, 2, second[1]) == 1
    pool.commit(second[2:])
    pool.free(first)
    assert list(pool.free_queue) == [5, 6, 3]
    pool.free(second)
    assert list(pool.free_queue) == [5, 6, 3, 4, 2, 1]
    assert (find(pool, A), find(pool, B)) == ([1, 2, 3], [1, 2, 4])


def test_withdrawn_blocks_keep_their_owner_and_are_blank_when_freed() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    pool.stage(table, A, 0, None)
    pool.withdraw(table)
    assert find(pool, A) == []
    assert pool.num_live == 3
    pool.free(table)
    assert (pool.free_queue.num_blank, pool.free_queue.num_cached) == (3, 0)


def test_reset_does_nothing_while_a_block_has_an_owner() -> None:
    pool = BlockPool(4)
    pool.free(cached_table(pool, A))
    pool.allocate(1)
    assert pool.reset() is False
    assert find(pool, A) == [1, 2, 3]


def test_reset_makes_every_block_blank_and_is_not_counted_as_eviction() -> None:
    pool = BlockPool(4)
    pool.free(cached_table(pool, A))
    assert pool.reset() is True
    assert find(pool, A) == []
    assert (pool.free_queue.num_blank, pool.num_evicted) == (4, 0)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
