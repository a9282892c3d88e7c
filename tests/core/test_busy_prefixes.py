"""The beginnings that save the most tokens stay counted, in bounded memory."""

from __future__ import annotations

from core_world import World

from anaphora.core.busy_prefixes import BusyPrefix, BusyPrefixes
from anaphora.core.ids import BlockHash


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4))


def test_hits_are_counted_where_they_end_and_sorted_by_the_tokens_that_they_saved() -> None:
    prefixes = BusyPrefixes()
    for number, num_tokens in ((1, 16), (2, 64), (1, 16), (3, 16)):
        prefixes.found(name(number), num_tokens)
    assert prefixes.busiest(2) == [BusyPrefix(name(2), 64, 1), BusyPrefix(name(1), 16, 2)]
    assert [prefix.num_hit_tokens for prefix in prefixes.busiest(9)] == [64, 32, 16]


def test_the_busiest_ones_survive_any_number_of_others_and_the_latest_of_equal_ones() -> None:
    prefixes = BusyPrefixes()
    for number in range(10_000):
        prefixes.found(name(number), 16)
        if number % 100 == 0:
            prefixes.found(name(1 << 30), 16)
        if number % 13 == 0:
            assert len(prefixes.busiest(1 << 20)) < 1024
    assert prefixes.busiest(1) == [BusyPrefix(name(1 << 30), 16, 100)]
    assert BusyPrefix(name(9_999), 16, 1) in prefixes.busiest(1 << 20)


def test_a_request_counts_once_at_its_first_admission_and_misses_do_not() -> None:
    world = World(8, budget=64)
    world.add("a", [1] * 9)
    world.run()
    assert world.cache.finder.busy_prefixes.busiest(9) == []
    for request_id in ("b", "c"):
        world.add(request_id, [1] * 9, max_tokens=2)
        world.run()
    (prefix,) = world.cache.finder.busy_prefixes.busiest(9)
    assert (prefix.num_tokens, prefix.num_requests) == (8, 2)
    chain = world.requests["c"].chain
    assert chain is not None
    assert prefix.block_hash == chain.hashes[1]
