"""A trail finds what the names would have found: never what is another beginning, pending, or gone."""

from __future__ import annotations

from colliding_hashes import parent_blind
from core_world import ROOT, make_chain, make_request

from anaphora.core import CacheManager, Request
from anaphora.core.hashing import HashFunction, sha256
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex
from anaphora.core.trail import Trail, left_behind


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def make_cache(num_blocks: int = 8, hash_function: HashFunction = sha256) -> CacheManager:
    return CacheManager(num_blocks, 2, root=ROOT, hash_function=hash_function, min_trail_blocks=2)


def computed(cache: CacheManager, request_id: str, tokens: list[int], *, salt: str | None = None) -> Request:
    request = make_request(request_id, tokens, salt=salt)
    cache.register(request)
    assert cache.admit(request, cache.look_up(request))
    cache.commit(cache.stage(request, request.num_tokens))
    return request


def looked_up(cache: CacheManager, tokens: list[int], *, salt: str | None = None) -> tuple[Trail | None, list[int]]:
    """(the trail that a new request gets, its hit)."""
    request = make_request("probe", tokens, salt=salt)
    cache.register(request)
    assert request.chain is not None
    return request.chain.trail, list(cache.look_up(request).blocks)


def test_a_trail_is_left_where_a_request_lets_go_and_taken_as_far_as_the_next_one_agrees() -> None:
    cache = make_cache()
    cache.free(computed(cache, "a", [1, 1, 2, 2, 3, 3, 4]))
    for tokens, trail_blocks in (
        ([1, 1, 2, 2, 3, 3, 4], [1, 2, 3]),
        ([1, 1, 2, 2, 3, 3, 9, 9, 9], [1, 2, 3]),
        ([1, 1, 2, 2, 9, 9, 4], [1, 2]),
    ):
        trail, found = looked_up(cache, tokens)
        assert trail is not None
        assert (trail.blocks, found) == (trail_blocks, trail_blocks)
    assert looked_up(cache, [1, 1, 9, 9, 4]) == (None, [1])  # one block is no trail
    assert looked_up(cache, [1, 1, 2, 2, 3, 3, 4], salt="x") == (None, [])
    cache.replace_root(b"another model")
    assert looked_up(cache, [1, 1, 2, 2, 3, 3, 4]) == (None, [])


def test_a_trail_finds_without_names_and_only_up_to_the_limit() -> None:
    index = PrefixIndex(4)
    chain = make_chain([1, 2, 3], 1)
    index.commit(ids(1, 2, 3)[: index.stage(ids(1, 2, 3), chain, 0, None)])
    chain.trail = left_behind(None, ids(1, 2, 3), 3, index.lineages, 2)
    chain.hashes[:] = [b"", b"", b""]  # type: ignore[list-item]
    assert [index.find(chain, limit) for limit in (0, 1, 2, 3)] == [
        ([], 0),
        ([1], 1),
        ([1, 2], 2),
        ([1, 2, 3], 3),
    ]


def test_what_is_gone_ends_a_trail_and_names_go_on_from_there() -> None:
    index = PrefixIndex(8)
    chain = make_chain([1, 2, 3, 4], 1)
    index.commit(ids(1, 2, 3, 4)[: index.stage(ids(1, 2, 3, 4), chain, 0, None)])
    chain.trail = left_behind(None, ids(1, 2, 3, 4), 4, index.lineages, 2)
    index.remove_all(ids(4, 3))
    assert index.find(chain, 4) == ([1, 2], 2)
    index.commit(ids(6, 5)[: index.stage(ids(6, 5), chain, 2, BlockId(2))])  # computed again, elsewhere
    assert index.find(chain, 4) == ([1, 2, 6, 5], 4)
    index.stage(ids(3), make_chain([7, 8, 9], 1), 0, None)  # what was on the trail holds something else
    index.remove(BlockId(1))
    assert index.find(chain, 4) == ([], 0)


def test_a_block_that_comes_back_to_its_lineage_as_a_copy_is_pending_until_its_step_has_succeeded() -> None:
    index = PrefixIndex(6)
    chain = make_chain([1, 2], 1)
    for blocks in (ids(1, 2), ids(3, 4)):
        index.commit(blocks[: index.stage(blocks, chain, 0, None)])
    chain.trail = left_behind(None, ids(1, 2), 2, index.lineages, 2)
    index.remove_all(ids(2, 1))
    index.stage(ids(1, 2), chain, 0, None)  # of one beginning with 3 and 4 again, and not yet written
    assert index.find(chain, 2) == ([3, 4], 2)
    index.commit(ids(1, 2))
    assert index.find(chain, 2) == ([1, 2], 2)


def test_another_beginning_of_the_same_hashes_gets_no_trail() -> None:
    cache = make_cache(hash_function=parent_blind)
    cache.free(computed(cache, "a", [1, 9, 5, 6, 7, 8, 4]))
    trail, found = looked_up(cache, [2, 9, 5, 6, 7, 8, 4])
    assert (trail, found) == (None, [])


def test_no_trail_leads_through_pending_blocks() -> None:
    cache = make_cache()
    request = make_request("a", [1, 1, 2, 2, 3])
    cache.register(request)
    assert request.chain is not None
    assert cache.admit(request, cache.look_up(request))
    staged = cache.stage(request, 5)
    cache.free(request)
    assert request.chain.trail is None
    cache.withdraw(staged)
    assert looked_up(cache, [1, 1, 2, 2, 3]) == (None, [])


def test_a_trail_is_kept_while_it_is_right_but_for_a_few_blocks_and_made_anew_where_it_is_not() -> None:
    lineages = list(range(10, 20))  # by block id
    trail = left_behind(None, ids(1, 2, 3, 4), 4, lineages, 2)  # type: ignore[arg-type]
    assert trail is not None
    same = [left_behind(trail, ids(1, 2, 3, 4, 5), count, lineages, 2) for count in (3, 4, 5)]  # type: ignore[arg-type]
    assert [each is trail for each in same] == [True, True, True]
    assert [trail.beginning(count) is trail for count in (3, 4, 5)] == [False, True, True]
    for table, blocks in (
        (ids(1, 2, 3, 5), ids(1, 2, 3)),
        (ids(1, 2, 5, 6), ids(1, 2, 5, 6)),
        (ids(1, 2, 3, 4, 5, 6), ids(1, 2, 3, 4, 5, 6)),
        (ids(5, 6), ids(5, 6)),
        (ids(1, 5), ids(1, 5)),  # the one block that is right is no trail
    ):
        other = left_behind(trail, table, len(table), lineages, 2)  # type: ignore[arg-type]
        assert other is not None
        assert (other.blocks, other.num_unchanged(lineages)) == (blocks, len(blocks))  # type: ignore[arg-type]


def test_what_is_not_findable_of_a_table_leaves_no_trail() -> None:
    lineages = [0, 11, 12, 0, 0]
    assert left_behind(None, ids(3, 4), 2, lineages, 2) is None  # type: ignore[arg-type]
    assert left_behind(None, ids(1, 3, 4), 3, lineages, 2) is None  # type: ignore[arg-type]
    trail = left_behind(None, ids(1, 2, 3), 3, lineages, 2)  # type: ignore[arg-type]
    assert trail is not None
    assert trail.blocks == [1, 2]


def test_a_trail_of_copies_in_between_has_their_lineages() -> None:
    index = PrefixIndex(8)
    for blocks, tokens in ((ids(1), [1]), (ids(2, 3), [7, 8]), (ids(4, 5), [1, 2])):  # 4 is a copy of 1
        chain = make_chain(tokens, 1)
        index.commit(blocks[: index.stage(blocks, chain, 0, None)])
    assert [index.lineages[block] for block in (4, 5)] == [2, 5]
    trail = left_behind(None, ids(4, 5), 2, index.lineages, 2)
    assert trail is not None
    assert (trail.blocks, trail.num_unchanged(index.lineages)) == ([4, 5], 2)
