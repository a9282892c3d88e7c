"""The order in which blocks without an owner are reused."""

from __future__ import annotations

import random

import pytest

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


@pytest.mark.parametrize("seed", range(6))
def test_lru_is_a_list_whoever_leaves_from_wherever(seed: int) -> None:
    draw = random.Random(seed)
    queue, model = LRU(PrefixIndex(201)), list[BlockId]()
    away = [BlockId(block) for block in range(1, 201)]
    num_passed_over = 0
    for _ in range(1500):
        match draw.randrange(6):
            case 0 | 1 if away:
                blocks = [away.pop(draw.randrange(len(away))) for _ in range(min(len(away), draw.randrange(1, 30)))]
                queue.put(blocks, len(blocks) - 1)
                model += blocks
            case 2 if model:  # as a hit does: what was released together, parents first, and more or less of it
                last = draw.randrange(len(model))
                blocks = model[max(0, last - draw.randrange(20)) : last + 1][::-1]
                queue.remove(blocks)
                away += blocks
                model = [block for block in model if block not in blocks]
            case 3 if model:
                block = model.pop(draw.randrange(len(model)))
                queue.discard(block)
                away.append(block)
            case 4 if model:
                count = draw.randrange(1, len(model) + 1) if draw.random() < 0.2 else min(len(model), 5)
                assert queue.take(count) == model[:count]
                away += model[:count]
                del model[:count]
            case 5:
                num_passed_over = max(num_passed_over, len(list(queue._passed_over.elements())))
        assert list(queue) == model
        assert len(queue) == len(model)
        assert sum(map(len, queue._batches)) <= 2 * len(model) + 64
        assert len(queue._batches) <= 2 * len(model) + 64
    assert num_passed_over > 10  # GUARD: blocks left from the middle
    assert queue.pop_all() == model
    assert len(queue) == 0


def test_lru_does_not_grow_where_everything_is_found_again_and_nothing_evicted() -> None:
    queue = LRU(PrefixIndex(5))
    for _ in range(1000):
        queue.put(ids(4, 3, 2, 1), 3)
        queue.remove(ids(1, 2, 3, 4))
        assert len(queue._batches) <= 65
    for _ in range(1000):
        queue.put(ids(4, 3, 2, 1), 3)
        queue.discard(BlockId(3))
        queue.remove(ids(1, 2, 4))
        assert sum(map(len, queue._batches)) <= 2 * 65
    assert list(queue) == []
