"""What else than tokens a block depends on: the same identity hits, each single change misses from its block on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from cache_world import BLOCK_SIZE, TOKENS, Cache, Keys
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.core import Request
from anaphora.core.hashing import ExtraKey, ExtraKeyKind, lora_key, salt_key, salt_keys
from anaphora.errors import InvalidParameterError, InvalidTokenError
from anaphora.salt_regions import MAX_REGIONS, SaltRegions
from anaphora.sampling_params import SamplingParams

ADAPTERS = (None, "ab" * 32, "cd" * 32)


def image(content: bytes, block_index: int) -> ExtraKey:
    return ExtraKey(ExtraKeyKind.MULTIMODAL, content, block_index)


def rows(content: bytes, block_index: int) -> ExtraKey:
    return ExtraKey(ExtraKeyKind.PROMPT_EMBEDDING, content, block_index)


def cache_with(keys: Keys) -> Cache:
    cache = Cache()
    assert cache.compute(cache.request(keys)) == 0
    assert cache.hit(keys) == 6
    return cache


BASE = [salt_key("s"), lora_key("ab" * 32), image(b"cat", 2), image(b"cat", 3), rows(b"\x01row", 4)]

CHANGES: dict[str, tuple[list[ExtraKey], int]] = {
    "no salt": (BASE[1:], 0),
    "another salt": ([salt_key("t"), *BASE[1:]], 0),
    "the salt later": ([salt_key("s", 1), *BASE[1:]], 0),
    "a further salt later": ([*BASE, salt_key("s", 5)], 5),
    "no adapter": ([BASE[0], *BASE[2:]], 0),
    "another adapter": ([BASE[0], lora_key("ac" * 32), *BASE[2:]], 0),
    "another image": ([*BASE[:2], image(b"dog", 2), image(b"dog", 3), BASE[4]], 2),
    "another second half of the image": ([*BASE[:3], image(b"dog", 3), BASE[4]], 3),
    "the image in one block only": ([*BASE[:3], BASE[4]], 3),
    "a second image": ([*BASE, image(b"dog", 3)], 3),
    "the image twice in one block": ([*BASE, BASE[3]], 3),
    "no embeddings": (BASE[:4], 4),
    "other embeddings": ([*BASE[:4], rows(b"\x01now", 4)], 4),
    "another mask": ([*BASE[:4], rows(b"\x02row", 4)], 4),
    "an embedding where an image was": ([*BASE[:3], rows(b"cat", 3), BASE[4]], 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_single_change_misses_from_its_block_on_and_no_earlier(change: str) -> None:
    keys, expected = CHANGES[change]
    cache = cache_with(BASE)
    assert cache.hit(keys) == expected
    assert cache.hit([*reversed(BASE)]) == 6


def test_another_root_shares_nothing() -> None:
    one, other = Cache(b"root"), Cache(b"toor")
    assert set(one.request().chain.hashes).isdisjoint(other.request().chain.hashes)  # type: ignore[union-attr]


def test_salts_adapters_and_images_crossed_share_what_they_have_in_common_and_nothing_else() -> None:
    salts = [None, "a", "b", SaltRegions([(5, "a")]), SaltRegions([(9, "a")])]
    images = [None, image(b"cat", 3), image(b"dog", 3)]
    cache = Cache()
    done: list[tuple[object, object, object]] = []
    for salt, adapter, picture in itertools.product(salts, ADAPTERS, images):
        keys = [
            *salt_keys(salt, BLOCK_SIZE),
            *([lora_key(adapter)] if adapter else []),
            *([picture] if picture else []),
        ]

        def common(other: tuple[object, object, object]) -> int:
            if other[1] != adapter:  # noqa: B023  (called in this round only)
                return 0
            begins = [
                0 if isinstance(each, str) else 6 if each is None else each.regions[0][0] // BLOCK_SIZE  # type: ignore[attr-defined]
                for each in (salt, other[0])  # noqa: B023
            ]
            parts = 6 if salt == other[0] else min(begins)  # noqa: B023
            return parts if picture == other[2] else min(parts, 3)  # noqa: B023

        assert cache.compute(cache.request(keys)) == max(map(common, done), default=0), keys
        done.append((salt, adapter, picture))
    assert len(done) == 45


# -- regions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "shared"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (23, 5), (24, 6), (1000, 6)])
def test_a_region_isolates_from_the_block_that_contains_its_start(start: int, shared: int) -> None:
    cache = Cache()
    cache.compute(cache.request())
    alice, bob = (salt_keys(SaltRegions([(start, name)]), BLOCK_SIZE) for name in ("alice", "bob"))
    assert cache.hit(alice) == shared
    cache.compute(cache.request(alice))
    assert [cache.hit(keys) for keys in (alice, bob, ())] == [6, shared, 6]


def test_regions_add_up_and_a_salt_for_all_is_one_that_starts_at_0() -> None:
    assert salt_keys("s", BLOCK_SIZE) == salt_keys(SaltRegions([(0, "s")]), BLOCK_SIZE)
    cache = cache_with(salt_keys(SaltRegions([(4, "team"), (12, "alice")]), BLOCK_SIZE))
    others = [
        [(4, "team"), (12, "bob")],
        [(4, "team")],
        [(4, "guests"), (12, "alice")],
        [(12, "alice")],
        [(5, "team"), (13, "alice")],  # the same blocks
        [(4, "team"), (12, "alice"), (16, "x")],
        [(4, "alice"), (12, "team")],
    ]
    found = [cache.hit(salt_keys(SaltRegions(regions), BLOCK_SIZE)) for regions in others]
    assert found == [3, 3, 1, 1, 6, 4, 1]


def test_all_salts_that_begin_in_a_block_count_in_it() -> None:
    cache = cache_with(salt_keys(SaltRegions([(5, "a"), (6, "b")]), BLOCK_SIZE))
    others = [[(5, "a")], [(5, "b")], [(5, "ab")], [(5, "a"), (6, "a")], [(5, "a"), (6, "b"), (7, "b")]]
    assert [cache.hit(salt_keys(SaltRegions(regions), BLOCK_SIZE)) for regions in others] == [1] * 5
    assert cache.hit(salt_keys(SaltRegions([(4, "b"), (7, "a")]), BLOCK_SIZE)) == 6  # all of them, in any order


regions_strategy = st.dictionaries(
    st.integers(0, 40), st.sampled_from(["a", "b", "ab", "\x01", "a\x01\x01\0\0\0b"]), min_size=1, max_size=4
).map(lambda starts: SaltRegions(sorted(starts.items())))


@given(regions_strategy, regions_strategy)
@settings(deadline=None, derandomize=True, database=None)
def test_two_region_lists_agree_up_to_the_first_block_in_which_other_salts_begin(
    one: SaltRegions, other: SaltRegions
) -> None:
    def begins(regions: SaltRegions) -> list[list[str]]:
        return [sorted(salt for at, salt in regions.regions if at // BLOCK_SIZE == block) for block in range(6)]

    expected = next((block for block in range(6) if begins(one)[block] != begins(other)[block]), 6)
    assert cache_with(salt_keys(one, BLOCK_SIZE)).hit(salt_keys(other, BLOCK_SIZE)) == expected


def test_what_is_generated_behind_a_region_is_isolated_too() -> None:
    cache = Cache()
    request = cache.request(salt_keys(SaltRegions([(len(TOKENS), "alice")]), BLOCK_SIZE))
    for token in range(6):
        request.append(token)  # type: ignore[arg-type]
    cache.compute(request)
    whole = [*TOKENS, *range(6), 0]
    assert cache.hit((), whole) == 6
    assert cache.hit(salt_keys(SaltRegions([(len(TOKENS), "alice")]), BLOCK_SIZE), whole) == 8


@pytest.mark.parametrize(
    "regions",
    [
        [],
        "a",
        b"a",
        7,
        None,
        [(0, "a"), (0, "b")],
        [(4, "a"), (3, "b")],
        [(-1, "a")],
        [(True, "a")],
        [(0.0, "a")],
        [("0", "a")],
        [(0, "")],
        [(0, b"a")],
        [(0, None)],
        [(0, "\ud800")],
        [(0,)],
        ["ab"],
        [(start, "a") for start in range(MAX_REGIONS + 1)],
    ],
)
def test_regions_that_say_nothing_certain_are_refused(regions: object) -> None:
    with pytest.raises(InvalidParameterError, match="cache_salt"):
        SaltRegions(regions)  # type: ignore[arg-type]


# -- values that Python calls equal ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [(1, b"x"), (True, b"x"), (ExtraKeyKind.SALT, bytearray(b"x")), (ExtraKeyKind.SALT, "x")]
    + [(ExtraKeyKind.SALT, b"x", index) for index in (True, 1.0, -1, None)],
)
def test_an_extra_key_of_values_that_only_equal_its_own_is_refused(values: tuple[object, ...]) -> None:
    with pytest.raises(InvalidParameterError, match="extra key"):
        ExtraKey(*values)  # type: ignore[arg-type]


@pytest.mark.parametrize("digest", ["", "AB", "a", "a b ", "0x", b"ab", 1, None])
def test_an_adapter_is_named_by_one_spelling_of_its_digest(digest: object) -> None:
    with pytest.raises(InvalidParameterError, match="adapter"):
        lora_key(digest)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[1, True], [False], (1.0,), ["1"], [None]])
def test_a_prompt_of_values_that_only_equal_tokens_is_refused(tokens: Sequence[int]) -> None:
    with pytest.raises(InvalidTokenError, match="integers"):
        Request("r", tokens, SamplingParams())
