"""What was forgotten is never found by a request that comes later, and nothing else is lost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from cache_world import BLOCK_SIZE, TOKENS, Cache, Keys
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.core.hashing import ExtraKey, lora_key, pack_tokens, salt_key, salt_keys
from anaphora.core.ids import BlockHash
from anaphora.core.scopes import Scopes
from anaphora.errors import InvalidParameterError
from anaphora.salt_regions import SaltRegions

A, B = [salt_key("a")], [salt_key("b")]
ADAPTER = lora_key("ab" * 32)


def forget(cache: Cache, key: ExtraKey) -> None:
    cache.manager.finder.chains.scopes.forget(key)


def forget_prefix(cache: Cache, tokens: Sequence[int], keys: Keys = (), oldest: int | None = None) -> int:
    return cache.manager.finder.forget_prefix(pack_tokens(tokens), keys, oldest)


def warm(*identities: Keys) -> Cache:
    cache = Cache()
    for keys in identities:
        cache.compute(cache.request(keys))
        assert cache.hit(keys) == 6
    return cache


def test_a_salt_is_forgotten_and_the_others_are_not_as_often_as_wanted() -> None:
    cache = warm((), A, B)
    for _ in range(3):
        forget(cache, A[0])
        assert [cache.hit(keys) for keys in ((), A, B)] == [6, 0, 6]
        assert cache.compute(cache.request(A)) == 0
        assert cache.hit(A) == 6


def test_a_salt_is_forgotten_wherever_it_begins() -> None:
    alice, bob = (salt_keys(SaltRegions([(4, "team"), (12, name)]), BLOCK_SIZE) for name in ("alice", "bob"))
    cache = warm((), alice, bob)
    forget(cache, salt_key("alice"))
    assert [cache.hit(keys) for keys in ((), alice, bob)] == [6, 3, 6]
    forget(cache, salt_key("team"))
    assert [cache.hit(keys) for keys in ((), alice, bob)] == [6, 1, 1]


def test_an_adapter_is_forgotten_under_every_salt_and_a_salt_of_its_bytes_is_not() -> None:
    other, text = lora_key("cd" * 32), [salt_key("x")]
    identities = [[ADAPTER], [*A, ADAPTER], [other], A, text]
    cache = warm(*identities)
    forget(cache, ADAPTER)
    assert [cache.hit(keys) for keys in identities] == [0, 0, 6, 6, 6]
    forget(cache, ExtraKey(text[0].kind, b"y"))
    assert cache.hit(text) == 6


@pytest.mark.parametrize("what", ["salt", "prefix"])
def test_who_came_before_goes_on_finds_its_own_and_leaves_nothing_to_who_comes_after(what: str) -> None:
    cache = Cache()
    manager = cache.manager
    running, waiting = cache.request(A), cache.request(A)
    assert manager.admit(running, manager.look_up(running))
    manager.commit(manager.stage(running, 12))
    if what == "salt":
        forget(cache, A[0])
    else:
        forget_prefix(cache, TOKENS[:4], A, oldest=0)
    after = cache.request(A)
    assert len(manager.look_up(after).blocks) == 0
    manager.commit(manager.stage(running, 24))  # computed after
    assert len(manager.look_up(after).blocks) == 0
    assert cache.hit(A) == 0
    assert len(manager.look_up(waiting).blocks) == 6
    manager.free(running)  # preempted
    assert len(manager.look_up(running).blocks) == 6
    assert cache.compute(after) == 0
    assert cache.hit(A) == 6


def test_a_prefix_is_forgotten_with_all_that_begins_with_it_and_nothing_else() -> None:
    cache = warm((), A)
    longer, parted, early = [*TOKENS, *range(20)], [*TOKENS[:13], *range(20)], [*TOKENS[:5], *range(20)]
    for tokens in (longer, parted, early):
        cache.compute(cache.request((), tokens))
    full = [cache.hit((), tokens) for tokens in (longer, parted, early)]
    assert full == [11, 8, 6]
    assert forget_prefix(cache, TOKENS[:11]) == 8  # whole blocks
    assert [cache.hit((), tokens) for tokens in (longer, parted, early)] == [1, 1, 6]
    assert cache.hit(A) == 6  # another identity
    assert cache.compute(cache.request((), longer)) == 1
    assert [cache.hit((), tokens) for tokens in (longer, parted)] == [11, 3]
    assert forget_prefix(cache, TOKENS[:20]) == 20  # further in
    assert [cache.hit((), tokens) for tokens in (longer, TOKENS, parted)] == [4, 4, 3]
    cache.compute(cache.request())
    for _ in range(3):
        assert forget_prefix(cache, TOKENS[:8]) == 8  # once more, and further out
        assert [cache.hit((), tokens) for tokens in (longer, TOKENS, parted, early)] == [1, 1, 1, 6]
        cache.compute(cache.request())
        assert cache.hit() == 6


def test_a_prefix_of_a_salt_that_was_forgotten_is_that_of_now() -> None:
    cache = warm(A)
    forget(cache, A[0])
    cache.compute(cache.request(A))
    forget_prefix(cache, TOKENS[:8], A)
    assert cache.hit(A) == 1


def test_who_generates_its_way_into_a_forgotten_prefix_does_not_find_it_after_a_preemption() -> None:
    cache = warm(())
    forget_prefix(cache, TOKENS[:16], oldest=0)
    request = cache.request((), TOKENS[:9])
    for token in TOKENS[9:]:
        request.append(token)  # type: ignore[arg-type]
    assert request.chain is not None
    assert len(cache.manager.look_up(request).blocks) == 3
    cache.compute(request)
    assert cache.hit() == 3  # and what it computed of it is not found by others


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_prefix_without_a_full_block_is_refused(num_tokens: int) -> None:
    with pytest.raises(InvalidParameterError, match="blocks are forgotten whole"):
        forget_prefix(Cache(), TOKENS[:num_tokens])


# -- against plain sets ------------------------------------------------------------------------------------------------

SALTS = [None, "a", "b", SaltRegions([(4, "a")]), SaltRegions([(8, "a"), (9, "b")])]
operations = st.one_of(
    st.tuples(st.just("compute"), st.integers(0, 3), st.sampled_from(SALTS), st.integers(1, 6)),
    st.tuples(st.just("salt"), st.sampled_from("ab")),
    st.tuples(st.just("prefix"), st.integers(0, 3), st.sampled_from(SALTS), st.integers(1, 6)),
)


def text_of(number: int, num_blocks: int) -> list[int]:
    """Two pairs of texts: the pairs share nothing, in a pair three blocks are shared."""
    blocks = [[number // 2 * 50 + (number % 2 * 10 if block >= 3 else 0) + block] * BLOCK_SIZE for block in range(6)]
    return [token for block in blocks[:num_blocks] for token in block]


def beginnings_of(tokens: Sequence[int], keys: Keys) -> list[tuple[object, ...]]:
    """Each beginning of whole blocks, as what it depends on."""
    blocks = [
        (
            tokens[index * 4 : index * 4 + 4],
            sorted((int(key.kind), key.payload) for key in keys if key.block_index == index),
        )
        for index in range(len(tokens) // 4)
    ]
    return [tuple(map(repr, blocks[: count + 1])) for count in range(len(blocks))]


@given(st.lists(operations, max_size=20), st.sampled_from((1, 2, 3, 100)))
@settings(deadline=None, derandomize=True, database=None, max_examples=300)
def test_a_request_finds_what_was_computed_and_not_forgotten_since(
    steps: list[tuple[object, ...]], max_prefixes_before_pruning: int
) -> None:
    """Never more; and never less while every prefix is in the table: one that has left it costs a miss."""
    cache, known = Cache(), set[tuple[object, ...]]()
    cache.manager.finder.chains.scopes._prune_above = max_prefixes_before_pruning
    for kind, *values in steps:
        if kind == "salt":
            (salt,) = values
            forget(cache, salt_key(str(salt)))
            mark = repr((1, str(salt).encode()))
            known = {each for each in known if not any(mark in str(block) for block in each)}
            continue
        number, chosen, num_blocks = values
        tokens = text_of(number, num_blocks)  # type: ignore[arg-type]
        keys = salt_keys(chosen, BLOCK_SIZE)  # type: ignore[arg-type]
        beginnings = beginnings_of(tokens, keys)
        if kind == "prefix":
            assert forget_prefix(cache, tokens, keys) == len(tokens)
            known = {each for each in known if each[: len(beginnings)] != beginnings[-1]}
            continue
        expected = next((count for count, each in enumerate(beginnings) if each not in known), len(beginnings))
        found = cache.compute(cache.request(keys, [*tokens, 7]))
        assert found <= expected
        assert found == expected or max_prefixes_before_pruning < len(steps)
        known |= set(beginnings)


# -- the table stays small, and forgetting it never brings anything back -----------------------------------------------


@given(st.lists(st.sampled_from("abcdefgh"), max_size=60), st.integers(1, 4))
@settings(deadline=None, derandomize=True, database=None)
def test_an_epoch_never_comes_back_however_small_the_table_is(forgotten: list[str], max_scopes: int) -> None:
    scopes = Scopes(max_scopes)
    seen: dict[str, list[tuple[ExtraKey, ...]]] = {name: [scopes.stamp([salt_key(name)])] for name in "abcdefgh"}
    for name in forgotten:
        scopes.forget(salt_key(name))
        assert scopes.stamp([salt_key(name)]) not in seen[name]
        for each, stamps in seen.items():
            stamp = scopes.stamp([salt_key(each)])
            if stamp != stamps[-1]:
                assert stamp not in stamps  # to lose hits is allowed, to find old ones is not
                stamps.append(stamp)
        assert len(scopes) <= max_scopes


def test_a_scope_that_is_pushed_out_of_the_table_keeps_its_epoch_and_its_hits() -> None:
    scopes = Scopes(max_scopes=1)
    scopes.forget(salt_key("a"))
    stamp = scopes.stamp(A)
    scopes.forget(salt_key("b"))
    assert scopes.stamp(A) == stamp != tuple(A)


def test_prefixes_of_which_nothing_is_left_leave_the_table() -> None:
    scopes = Scopes()
    names = [BlockHash(bytes([number // 256, number % 256])) for number in range(1000)]
    for name in names:
        scopes.forget_prefix(name, lambda each: each in names[:10], None)
        assert len(scopes) <= 2 * 11 + 64
    assert all(scopes.cut([name], 0, 1) == 0 for name in names[:10])


def test_a_prefix_that_a_request_of_before_may_compute_again_stays() -> None:
    cache = Cache()
    old = cache.request()
    forget_prefix(cache, TOKENS[:8], oldest=old.epoch)
    for number in range(200):
        forget_prefix(cache, [number] * 4, oldest=old.epoch)
    cache.compute(old)
    assert cache.hit() == 1


def test_a_table_that_is_full_refuses_and_stays_as_it_is() -> None:
    scopes = Scopes(max_prefixes=2)
    for name in (b"a", b"b"):
        scopes.forget_prefix(BlockHash(name), lambda _: True, None)
    with pytest.raises(InvalidParameterError, match="reset the cache"):
        scopes.forget_prefix(BlockHash(b"c"), lambda _: True, None)
    cuts = [scopes.cut([BlockHash(name)], 0, 1) for name in (b"a", b"b", b"c")]
    assert cuts == [0, 0, None]


def test_what_nothing_was_forgotten_of_has_the_names_of_the_published_format() -> None:
    cache = Cache()
    before = cache.request(A).chain
    forget(cache, salt_key("b"))
    forget_prefix(cache, TOKENS[:8])
    after = cache.request(A).chain
    assert before is not None
    assert after is not None
    assert before.hashes == after.hashes
    assert array("I", TOKENS) == after.token_ids
