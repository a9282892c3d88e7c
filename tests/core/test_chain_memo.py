"""A chain filled from what was hashed before is the chain that hashing would have made, whatever the hash function."""

from __future__ import annotations

from array import array
from hashlib import sha256

from colliding_hashes import constant, one_bit, one_byte, parent_blind
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.core.chain_memo import ChainMemo
from anaphora.core.common_length import common_length, common_tokens
from anaphora.core.hashing import BlockChain, Digest, ExtraKey, ExtraKeyKind, HashFunction, salt_key


class CountingHash:
    """Counts the calls of another hash function."""

    def __init__(self, hash_function: HashFunction = sha256) -> None:
        self.num_calls = 0
        self._hash_function = hash_function

    def __call__(self, data: bytes) -> Digest:
        self.num_calls += 1
        return self._hash_function(data)


def new_chain(hash_function: HashFunction, salt: str = "", image_at: int | None = None) -> BlockChain:
    keys = [salt_key(salt)] if salt else []
    if image_at is not None:
        keys.append(ExtraKey(ExtraKeyKind.MULTIMODAL, b"image", image_at))
    return BlockChain(b"root", 2, hash_function, keys)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),  # which earlier sequence, and how much of it
            st.integers(0, 40),
            st.lists(st.integers(0, 2), max_size=12),
            st.sampled_from(["", "", "a"]),
            st.sampled_from([None, None, 0, 2]),
            st.integers(0, 5),  # tokens that come later
        ),
        max_size=12,
    ),
    st.sampled_from([sha256, constant, one_bit, one_byte, parent_blind]),
    st.integers(1, 40),
)
@settings(deadline=None, derandomize=True, database=None, max_examples=300)
def test_filling_is_hashing(
    sequences: list[tuple[int, int, list[int], str, int | None, int]], hash_function: HashFunction, max_blocks: int
) -> None:
    memo = ChainMemo(max_blocks)
    made: list[array[int]] = []
    pairs = []
    for base, cut, suffix, salt, image_at, num_later in sequences:
        beginning = made[base % len(made)][:cut] if made else array("I")
        tokens = beginning + array("I", suffix)
        chain = new_chain(hash_function, salt, image_at)
        memo.fill(chain, tokens)
        for token in range(num_later):
            tokens.append(token % 2)
            chain.extend(tokens)
        plain = new_chain(hash_function, salt, image_at)
        plain.extend(tokens)
        assert (chain.hashes, chain.contents) == (plain.hashes, plain.contents)
        made.append(tokens)
        pairs.append((chain, plain))
    assert all((chain.hashes, chain.contents) == (plain.hashes, plain.contents) for chain, plain in pairs)  # still


def test_a_known_beginning_costs_two_hashes_whatever_its_length() -> None:
    hash_function = CountingHash()
    memo = ChainMemo(10_000)
    beginning = array("I", range(2_000))
    memo.fill(new_chain(hash_function), beginning)
    assert hash_function.num_calls == 1_000
    memo.fill(new_chain(hash_function), beginning + array("I", [7, 7]))
    assert hash_function.num_calls == 1_002
    memo.fill(new_chain(hash_function), beginning + array("I", [7, 7]))
    assert hash_function.num_calls == 1_003  # and the second chain is the one that goes on


def test_a_memo_forgets_the_chains_that_were_used_longest_ago() -> None:
    hash_function = CountingHash()
    memo = ChainMemo(10)
    one, two, three = (array("I", [letter] * 10) for letter in range(3))  # five blocks each
    for tokens in (one, two, one, three, one):
        memo.fill(new_chain(hash_function), tokens)
    # one and two are hashed, one copied, three pushes two out, one is copied again.
    assert hash_function.num_calls == 5 + 5 + 1 + 5 + 1
    memo.fill(new_chain(hash_function), two)
    assert hash_function.num_calls == 17 + 5


def test_chains_of_the_same_blocks_have_their_lists_in_common_until_one_of_them_goes_on() -> None:
    memo = ChainMemo(100)
    chains = [new_chain(sha256) for _ in range(3)]
    texts = [array("I", range(10)) for _ in chains]
    for chain, tokens in zip(chains, texts, strict=True):
        memo.fill(chain, tokens)
    assert chains[0].hashes is chains[1].hashes is chains[2].hashes
    texts[1].extend([1, 1])
    chains[1].extend(texts[1])
    texts[0].extend([2, 2])
    chains[0].extend(texts[0])
    assert [len(chain.hashes) for chain in chains] == [6, 6, 5]
    assert [chain.contents[5:] for chain in chains] == [
        [array("I", [2, 2]).tobytes()],
        [array("I", [1, 1]).tobytes()],
        [],
    ]


def test_many_blocks_at_once_are_the_blocks_one_by_one() -> None:
    tokens = array("I", range(2 * 150))
    at_once, one_by_one = new_chain(sha256, image_at=70), new_chain(sha256, image_at=70)
    assert at_once.extend(tokens) == 150
    while one_by_one.extend(tokens, max_blocks=1):
        pass
    assert (at_once.hashes, at_once.contents) == (one_by_one.hashes, one_by_one.contents)


def test_another_salt_copies_nothing() -> None:
    hash_function = CountingHash()
    memo = ChainMemo(100)
    memo.fill(new_chain(hash_function, "a"), array("I", range(10)))
    memo.fill(new_chain(hash_function, "b"), array("I", range(10)))
    assert hash_function.num_calls == 10


def test_other_images_later_on_copy_what_is_before_them() -> None:
    hash_function = CountingHash()
    memo = ChainMemo(10_000)
    tokens = array("I", range(200))
    memo.fill(new_chain(hash_function, "a", image_at=60), tokens)
    assert hash_function.num_calls == 100
    memo.fill(new_chain(hash_function, "a", image_at=70), tokens)
    assert hash_function.num_calls == 100 + 1 + 40
    memo.fill(new_chain(hash_function, "a", image_at=70), tokens)
    assert hash_function.num_calls == 141 + 2


def test_a_collision_with_a_shorter_chain_copies_nothing() -> None:
    memo = ChainMemo(100)
    memo.fill(new_chain(parent_blind), array("I", [1, 7]))
    chain, plain = new_chain(parent_blind), new_chain(parent_blind)
    tokens = array("I", [2, 3, 4, 5, 6, 7, 8, 9])
    memo.fill(new_chain(parent_blind), tokens[:4])
    memo.fill(chain, tokens)  # its third block has the hash of the first chain's only one
    plain.extend(tokens)
    assert (chain.hashes, chain.contents) == (plain.hashes, plain.contents)


def test_another_salt_copies_nothing_even_where_hashes_collide() -> None:
    memo = ChainMemo(100)
    tokens = array("I", range(10))
    one, other = new_chain(constant, "a"), new_chain(constant, "b")
    memo.fill(one, tokens)
    memo.fill(other, tokens)
    assert one.hashes == other.hashes
    assert one.contents[0] != other.contents[0]
    assert one.contents[1:] == other.contents[1:]


@given(st.integers(0, 9_000), st.integers(0, 300), st.integers(0, 300), st.integers(0, 4_200))
@settings(deadline=None, derandomize=True, database=None)
def test_common_length_is_the_first_difference(shared: int, mine: int, other: int, start: int) -> None:
    beginning = array("I", [5]) * shared
    one, two = beginning + array("I", [1]) * mine, beginning + array("I", [2]) * other
    assert common_length(one, two, min(start, shared)) == shared
    assert common_tokens(one, two, min(start, shared)) == shared
