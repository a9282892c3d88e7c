"""The order in which blocks without an owner are reused."""

from __future__ import annotations

from anaphora.core.eviction import LRU
from anaphora.core.free_queue import FreeQueue
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex


def make_queue(num_blocks: int) -> FreeQueue:
    return FreeQueue(num_blocks, LRU(PrefixIndex(num_blocks + 1)))


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_a_new_queue_holds_every_usable_block_as_blank_in_ascending_order() -> None:
    queue = make_queue(5)
    assert list(queue) == [1, 2, 3, 4, 5]
    assert (len(queue), queue.num_blank, queue.num_cached) == (5, 5, 0)


def test_blank_blocks_go_before_any_cached_one_and_the_last_blank_one_first() -> None:
    queue = make_queue(4)
    assert queue.take(4) == ([1, 2, 3, 4], [])
    queue.cached.put(ids(2), 0)
    queue.put_blank(ids(4, 1))
    assert list(queue) == [1, 4, 2]
    assert queue.take(3) == ([1, 4], [2])
    assert len(queue) == 0


def test_cached_blocks_go_least_recently_released_first() -> None:
    queue = make_queue(4)
    queue.take(4)
    queue.cached.put(ids(3), 0)
    queue.cached.put(ids(1, 4), 1)
    assert queue.take(2) == ([], [3, 1])
    assert list(queue) == [4]


def test_a_found_block_leaves_from_the_middle_and_comes_back_as_the_most_recent() -> None:
    queue = make_queue(3)
    queue.take(3)
    queue.cached.put(ids(1, 2, 3), 2)
    queue.cached.remove(ids(2))
    assert list(queue) == [1, 3]
    queue.cached.put(ids(2), 0)
    assert list(queue) == [1, 3, 2]


def test_take_leaves_the_rest_as_it_was() -> None:
    queue = make_queue(6)
    assert queue.take(2) == ([1, 2], [])
    assert queue.take(1) == ([3], [])
    assert list(queue) == [4, 5, 6]


def test_pop_all_of_the_cached_ones_leaves_the_blank_ones() -> None:
    queue = make_queue(4)
    queue.take(3)
    queue.cached.put(ids(3, 1), 1)
    assert queue.cached.pop_all() == [3, 1]
    assert list(queue) == [4]
