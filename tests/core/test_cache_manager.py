"""Look up, admit, grow, stage, free: all or nothing, whole blocks, exact ids."""

from __future__ import annotations

import pytest
from core_world import ROOT, make_request

from anaphora.core import CacheManager, Request
from anaphora.errors import ConfigError


def make_cache(num_blocks: int, block_size: int = 4, *, enable_prefix_caching: bool = True) -> CacheManager:
    return CacheManager(num_blocks, block_size, root=ROOT, enable_prefix_caching=enable_prefix_caching)


def admitted(cache: CacheManager, request_id: str, tokens: range, *, salt: str | None = None) -> Request:
    """A request that holds its blocks, found or new."""
    request = make_request(request_id, tokens, salt=salt)
    cache.register(request)
    assert cache.admit(request, cache.look_up(request))
    return request


def computed(cache: CacheManager, request_id: str, tokens: range, *, salt: str | None = None) -> Request:
    """As admitted, with everything computed and committed."""
    request = admitted(cache, request_id, tokens, salt=salt)
    cache.commit(cache.stage(request, request.num_tokens))
    return request


def look_up(cache: CacheManager, tokens: range, *, salt: str | None = None) -> tuple[list[int], int, int]:
    request = make_request("probe", tokens, salt=salt)
    cache.register(request)
    hit = cache.look_up(request)
    return list(hit.blocks), hit.num_committed, hit.num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [(1, []), (4, []), (5, [1]), (8, [1]), (9, [1, 2]), (11, [1, 2]), (12, [1, 2]), (13, [1, 2, 3]), (40, [1, 2, 3])],
)
def test_a_hit_is_whole_blocks_and_never_the_last_token(num_tokens: int, blocks: list[int]) -> None:
    cache = make_cache(8)
    cache.free(computed(cache, "a", range(14)))  # three full blocks and two tokens
    assert look_up(cache, range(num_tokens)) == (blocks, len(blocks), 4 * len(blocks))


def test_a_block_that_is_not_full_is_never_staged() -> None:
    cache = make_cache(8)
    request = admitted(cache, "a", range(11))
    assert cache.stage(request, 3).blocks == []
    assert cache.stage(request, 4).blocks == [1]
    assert cache.stage(request, 7).blocks == []
    assert cache.stage(request, 11).blocks == [2]
    assert cache.table("a") == [1, 2, 3]
    assert look_up(cache, range(13)) == ([1, 2], 0, 8)  # pending


def test_another_salt_finds_nothing_and_the_same_salt_finds_all() -> None:
    cache = make_cache(8)
    computed(cache, "a", range(13), salt="tenant")
    assert look_up(cache, range(13)) == ([], 0, 0)
    assert look_up(cache, range(13), salt="Tenant") == ([], 0, 0)
    assert look_up(cache, range(13), salt="tenant") == ([1, 2, 3], 3, 12)


def test_admit_gives_the_blocks_of_the_hit_and_new_ones_for_every_other_known_token() -> None:
    cache = make_cache(8)
    first = computed(cache, "a", range(9))
    second = admitted(cache, "b", range(15))
    assert cache.table("a") == [1, 2, 3]
    assert cache.table("b") == [1, 2, 4, 5]
    assert (second.num_computed_tokens, second.num_staged_blocks) == (8, 2)
    assert cache.pool.ref_counts[:6] == [0, 2, 2, 1, 1, 1]
    cache.free(first)
    assert cache.pool.ref_counts[:6] == [0, 1, 1, 0, 1, 1]


def test_a_failed_admission_changes_nothing() -> None:
    cache = make_cache(4)
    cache.free(computed(cache, "a", range(8)))
    admitted(cache, "b", range(100, 104))
    request = make_request("c", range(17))
    cache.register(request)
    before = (list(cache.pool.free_queue), list(cache.pool.ref_counts), list(cache.pool.index.hashes))
    assert cache.admit(request, cache.look_up(request)) is False
    assert (list(cache.pool.free_queue), list(cache.pool.ref_counts), list(cache.pool.index.hashes)) == before
    assert cache.table("c") == ()
    assert (request.num_computed_tokens, cache.num_free_needed(request, cache.look_up(request))) == (0, 5)
    assert look_up(cache, range(9)) == ([1, 2], 2, 8)


def test_hits_that_are_free_are_charged_as_the_free_blocks_that_they_are() -> None:
    cache = make_cache(5)
    cache.free(computed(cache, "a", range(12)))
    admitted(cache, "b", range(100, 104))  # takes a blank block: four are free, three of them the hit
    request = make_request("c", range(17))
    cache.register(request)
    hit = cache.look_up(request)
    assert hit.blocks == [1, 2, 3]
    assert cache.admit(request, hit) is False  # two new ones, and only one free block is not of the hit
    smaller = admitted(cache, "d", range(16))
    assert cache.table("d") == [1, 2, 3, 5]
    assert cache.pool.num_free == 0
    assert smaller.num_computed_tokens == 12


def test_hits_with_an_owner_cost_nothing() -> None:
    cache = make_cache(5)
    computed(cache, "a", range(16))
    request = admitted(cache, "b", range(17))
    assert cache.table("b") == [1, 2, 3, 4, 5]
    assert request.num_computed_tokens == 16


def test_admission_never_evicts_the_blocks_of_its_own_hit() -> None:
    cache = make_cache(4)
    cache.free(computed(cache, "a", range(16)))
    assert list(cache.pool.free_queue) == [4, 3, 2, 1]
    admitted(cache, "b", range(50, 51))  # takes block 4
    request = admitted(cache, "c", range(9))
    assert cache.table("c") == [1, 2, 3]  # block 3 held the third block of "a", evicted for the ninth token
    assert request.num_computed_tokens == 8


def test_grow_appends_and_changes_nothing_when_the_pool_lacks_the_room() -> None:
    cache = make_cache(3)
    request = admitted(cache, "a", range(4))
    assert cache.grow(request, 4) is True
    assert cache.table("a") == [1]
    assert cache.grow(request, 5) is True
    assert cache.table("a") == [1, 2]
    assert cache.grow(request, 13) is False
    assert (cache.table("a"), cache.pool.num_free) == ([1, 2], 1)
    assert cache.grow(request, 12) is True
    assert cache.table("a") == [1, 2, 3]


def test_freeing_twice_gives_back_once() -> None:
    cache = make_cache(3)
    request = computed(cache, "a", range(9))
    cache.free(request)
    cache.free(request)
    assert cache.pool.ref_counts == [0, 0, 0, 0]
    assert len(cache.pool.free_queue) == 3
    assert cache.tables == {}


def test_without_prefix_caching_nothing_is_hashed_found_or_kept() -> None:
    cache = make_cache(4, enable_prefix_caching=False)
    request = admitted(cache, "a", range(13))
    assert request.chain is None
    assert cache.stage(request, 13).blocks == []
    cache.free(request)
    assert look_up(cache, range(13)) == ([], 0, 0)
    assert cache.pool.free_queue.num_blank == 4


def test_reset_tells_the_truth() -> None:
    cache = make_cache(4)
    request = computed(cache, "a", range(9))
    assert cache.reset() is False
    assert look_up(cache, range(9)) == ([1, 2], 2, 8)
    cache.free(request)
    assert cache.reset() is True
    assert look_up(cache, range(9)) == ([], 0, 0)


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        make_cache(4, 0)
