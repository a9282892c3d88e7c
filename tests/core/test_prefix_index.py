"""The hash finds, the content confirms: what the index gives out, when, and to whom."""

from __future__ import annotations

import pytest
from colliding_hashes import constant, parent_blind
from core_world import make_chain

from anaphora.core.hashing import BlockChain
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def put(index: PrefixIndex, chain: BlockChain, blocks: list[BlockId]) -> int:
    """Stage and commit; returns how many were indexed."""
    staged = index.stage(blocks, chain, 0, None)
    index.commit(blocks[:staged])
    return staged


def find(index: PrefixIndex, chain: BlockChain) -> list[BlockId]:
    return index.find(chain, len(chain.hashes))[0]


def test_staged_blocks_are_pending_committed_ones_are_not_and_withdrawn_ones_are_gone() -> None:
    index = PrefixIndex(4)
    chain = make_chain([1, 2, 3], 1)
    assert index.stage(ids(1, 2, 3), chain, 0, None) == 3
    assert index.find(chain, 3) == ([1, 2, 3], 0)
    assert (len(index), index.num_pending) == (0, 3)
    index.commit(ids(1, 2))
    assert index.find(chain, 3) == ([1, 2, 3], 2)
    index.withdraw(ids(3))
    assert index.find(chain, 3) == ([1, 2], 2)
    assert (len(index), index.num_pending) == (2, 0)


def test_find_stops_at_its_limit_and_at_the_end_of_the_chain() -> None:
    index = PrefixIndex(4)
    chain = make_chain([1, 2, 3], 1)
    put(index, chain, ids(1, 2, 3))
    assert index.find(chain, 2) == ([1, 2], 2)
    assert index.find(chain, 0) == ([], 0)
    assert index.find(chain, 99) == ([1, 2, 3], 3)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 319, 320, 321, 400])
def test_a_long_chain_is_found_in_whole_and_up_to_any_hole(length: int) -> None:
    index = PrefixIndex(length + 1)
    chain = make_chain(range(length), 1)
    blocks = [BlockId(block) for block in range(1, length + 1)]
    put(index, chain, blocks)
    assert index.find(chain, length) == (blocks, length)
    for hole in sorted({0, length // 2, length - 1}):
        index.remove(blocks[hole])
        assert index.find(chain, length) == (blocks[:hole], hole)
        index.stage(blocks[hole : hole + 1], chain, hole, blocks[hole - 1] if hole else None)
        index.commit(blocks[hole : hole + 1])
        # The new one is another beginning by lineage, so what followed the old one stays hidden.
        assert index.find(chain, length) == (blocks[: hole + 1], hole + 1)
        put(index := PrefixIndex(length + 1), chain, blocks)


def test_another_root_or_salt_finds_nothing() -> None:
    index = PrefixIndex(4)
    put(index, make_chain([1, 2, 3], 1), ids(1, 2, 3))
    assert find(index, make_chain([1, 2, 3], 1, salt="x")) == []
    elsewhere = BlockChain(b"another model", 1)
    elsewhere.extend(make_chain([1, 2, 3], 1).token_ids)
    assert find(index, elsewhere) == []


def test_a_block_whose_hash_collides_is_not_found_and_counted() -> None:
    index = PrefixIndex(6)
    mine = make_chain([1, 1], 1, hash_function=constant)
    other = make_chain([2, 2], 1, hash_function=constant)
    assert put(index, mine, ids(1, 2)) == 1  # the second block of the same chain collides with the first
    assert find(index, mine) == [1]
    assert find(index, other) == []
    assert put(index, other, ids(3, 4)) == 0
    assert index.num_collisions == 2
    assert find(index, mine) == [1]
    assert index.hashes[2] is index.hashes[3] is index.hashes[4] is None


def test_salts_are_confirmed_even_where_hashes_collide() -> None:
    index = PrefixIndex(3)
    put(index, make_chain([1], 1, salt="a", hash_function=constant), ids(1))
    assert find(index, make_chain([1], 1, salt="a", hash_function=constant)) == [1]
    assert find(index, make_chain([1], 1, salt="b", hash_function=constant)) == []
    assert find(index, make_chain([1], 1, hash_function=constant)) == []


def test_the_parent_is_confirmed_even_where_a_block_of_the_same_content_and_hash_has_another_one() -> None:
    index = PrefixIndex(6)
    put(index, make_chain([1, 7], 1, hash_function=parent_blind), ids(1, 2))
    put(index, make_chain([2], 1, hash_function=parent_blind), ids(3))
    assert find(index, make_chain([2, 7], 1, hash_function=parent_blind)) == [3]
    assert find(index, make_chain([7], 1, hash_function=parent_blind)) == []
    assert put(index, make_chain([2, 7], 1, hash_function=parent_blind), ids(4, 5)) == 1
    assert index.num_collisions == 1


def test_the_parent_of_a_pending_block_is_confirmed_too() -> None:
    index = PrefixIndex(6)
    index.stage(ids(1, 2), make_chain([1, 7], 1, hash_function=parent_blind), 0, None)
    index.stage(ids(3), make_chain([2], 1, hash_function=parent_blind), 0, None)
    assert index.find(make_chain([2, 7], 1, hash_function=parent_blind), 2) == ([3], 0)


def test_nothing_after_a_block_that_is_not_indexed_is_indexed() -> None:
    index = PrefixIndex(4)
    chain = make_chain([1, 2, 3], 1)
    assert index.stage(ids(2, 3), chain, 1, BlockId(1)) == 0
    assert index.find(chain, 3) == ([], 0)


def test_a_recomputed_parent_shares_its_lineage_with_the_copy_that_still_lives() -> None:
    index = PrefixIndex(5)
    chain = make_chain([1, 2], 1)
    put(index, chain, ids(1, 2))
    put(index, make_chain([1], 1), ids(3))
    index.remove(BlockId(1))
    assert find(index, chain) == [3, 2]
    index.remove(BlockId(3))
    assert find(index, chain) == []


def test_a_copy_staged_in_the_step_that_evicts_the_first_one_hands_its_lineage_on() -> None:
    index = PrefixIndex(6)
    chain = make_chain([1, 2, 3], 1)
    put(index, make_chain([1, 2], 1), ids(1, 2))
    index.stage(ids(3), chain, 1, BlockId(1))  # another request computes the second block again
    index.remove(BlockId(2))  # and a third one gets the first copy
    assert index.find(chain, 2) == ([1, 3], 1)
    index.stage(ids(4), chain, 1, BlockId(1))  # to compute the same
    index.commit(ids(3, 4))
    index.stage(ids(5), chain, 2, BlockId(3))
    index.commit(ids(5))
    index.remove(BlockId(3))
    assert find(index, chain) == [1, 4, 5]
    assert (index.num_collisions, index.num_duplicates) == (0, 1)


def test_remove_all_is_remove_for_each_with_and_without_copies() -> None:
    chain = make_chain([1, 2, 3], 1)
    for copied in (False, True):
        index = PrefixIndex(7)
        put(index, chain, ids(1, 2, 3))
        if copied:
            put(index, chain, ids(4, 5, 6))
        index.remove_all(ids(3, 2))
        assert find(index, chain) == ([1, 5, 6] if copied else [1])
        assert len(index) == (4 if copied else 1)
        assert index.hashes[2] is index.hashes[3] is None


def test_a_failed_writer_leaves_the_copy_of_another_writer_findable() -> None:
    index = PrefixIndex(5)
    chain = make_chain([1, 2], 1)
    index.stage(ids(1), chain, 0, None)  # will fail
    index.stage(ids(2, 3), chain, 0, None)  # writes the same beginning beside it
    assert index.find(chain, 2) == ([1, 3], 0)
    index.withdraw(ids(1))
    index.commit(ids(2, 3))
    assert index.find(chain, 2) == ([2, 3], 2)
    assert index.num_pending == index.num_duplicates == 0


def test_roots_that_no_block_hangs_from_are_forgotten_and_those_that_one_does_are_not() -> None:
    index = PrefixIndex(300)
    kept = make_chain([1, 2], 1)
    put(index, kept, ids(1, 2))
    for number in range(1000):
        chain = BlockChain(b"%d" % number, 1)
        chain.extend(kept.token_ids)
        assert index.stage(ids(3, 4), chain, 0, None) == 2
        assert find(index, chain) == [3, 4]  # pending blocks keep their root, too
        if number == 500:
            index.commit(ids(3, 4))
            index.remove_all(ids(4, 3))
        else:
            index.withdraw(ids(3, 4))
    assert len(index._roots) <= 2 + 2 * 64
    assert find(index, kept) == [1, 2]
    assert index.inconsistencies() == []
    returns = BlockChain(b"0", 1)
    returns.extend(kept.token_ids)
    assert put(index, returns, ids(5, 6)) == 2
    assert find(index, returns) == [5, 6]


@pytest.mark.parametrize("length", [8, 9, 100])
def test_a_name_behind_a_hole_does_not_make_up_for_the_hole(length: int) -> None:
    """A collision can put a name there whose beginning is not: halving then looks at the wrong side."""
    index = PrefixIndex(2 * length + 2)
    chain = make_chain(range(length), 1)
    blocks = [BlockId(block) for block in range(1, length + 1)]
    put(index, chain, blocks)
    for hole in range(1, length - 1):
        index._committed.pop(chain.hashes[hole])
        assert index.find(chain, length) == (blocks[:hole], hole)
        assert index.find(chain, length - 1) == (blocks[:hole], hole)
        index._committed[chain.hashes[hole]] = blocks[hole]


def test_two_blocks_of_one_chain_with_one_name_leave_nothing_of_the_second() -> None:
    index = PrefixIndex(8)
    chain = make_chain([1, 2, 3], 1, hash_function=constant)
    assert index.stage(ids(1, 2, 3), chain, 0, None) == 1
    assert index.num_pending == 1
    assert index.find(chain, 3) == ([1], 0)
    assert index.hashes[2] is index.hashes[3] is None
    assert index.num_collisions == 1


def test_one_commit_of_two_stagings_of_one_content_keeps_both() -> None:
    index = PrefixIndex(5)
    chain = make_chain([1, 2], 1)
    index.stage(ids(1, 2), chain, 0, None)
    index.stage(ids(3, 4), chain, 0, None)
    index.commit(ids(3, 4))
    assert index.num_pending == 2
    index.commit(ids(1, 2))
    assert [index.blocks_of(block_hash) for block_hash in chain.hashes] == [[3, 1], [4, 2]]
    assert (index.num_committed, index.num_duplicates, index.num_pending) == (4, 2, 0)


def test_a_copy_that_is_committed_first_stays_when_the_one_before_it_follows() -> None:
    index = PrefixIndex(4)
    chain = make_chain([1, 2], 1)
    for blocks in (ids(1), ids(2)):
        assert index.stage(blocks, chain, 0, None) == 1
    index.commit(ids(2))
    index.commit(ids(1))
    assert index.blocks_of(chain.hashes[0]) == [2, 1]
    assert (index.num_committed, index.num_duplicates, len(index)) == (2, 1, 2)
    assert index.inconsistencies() == []
