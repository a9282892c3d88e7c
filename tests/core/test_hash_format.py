"""The byte format of docs/hash-format.md, implemented a second time here, and what it promises."""

from __future__ import annotations

import re
import struct
from array import array
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.core.hashing import (
    BlockChain,
    Digest,
    ExtraKey,
    ExtraKeyKind,
    block_header,
    encode_extra_keys,
    encode_tokens,
    lora_key,
    pack_tokens,
    root_digest,
    salt_key,
    salt_keys,
)
from anaphora.core.scopes import Scopes
from anaphora.errors import InvalidParameterError
from anaphora.salt_regions import SaltRegions

SPEC = Path(__file__).parents[2] / "docs" / "hash-format.md"
IDENTITY = {"architecture": "LlamaForCausalLM", "weights": "sha256:00"}
Keys = list[tuple[int, bytes]]


# -- the format, written from its description --------------------------------------------------------------------------


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def root_of(identity: dict[str, str]) -> bytes:
    message = b"anaphora/root" + b"\x01" + u32(len(identity))
    for name, value in sorted(identity.items()):
        for data in (name.encode(), value.encode()):
            message += u32(len(data)) + data
    return sha256(message).digest()


def message_of(parent: bytes, tokens: list[int], keys: Keys) -> bytes:
    message = b"\x01" + u32(len(parent)) + u32(4 * len(tokens)) + parent
    for token in tokens:
        message += u32(token)
    for kind, payload in sorted(keys):
        message += bytes([kind]) + u32(len(payload)) + payload
    return message


def hashes_of(root: bytes, block_size: int, tokens: list[int], keys: dict[int, Keys]) -> list[bytes]:
    parent, hashes = root, []
    for index in range(len(tokens) // block_size):
        block = tokens[index * block_size : (index + 1) * block_size]
        parent = sha256(message_of(parent, block, keys.get(index, []))).digest()
        hashes.append(parent)
    return hashes


# -- golden vectors ----------------------------------------------------------------------------------------------------

EXTREMES = [0, 2**32 - 1, 256, 65536] * 2
ONE_TO_NINE = list(range(1, 10))
ADAPTER = "8c8aabe3cc6cda4debdc5e6a1a7fe8ffd932e901997702dc343c640644a00174"
IMAGE = bytes(range(32)) + struct.pack("<iI", -2, 4)
ROWS = b"\x05" + bytes(range(32))


def chain_of(tokens: list[int], *keys: ExtraKey, root: bytes | None = None, block_size: int = 4) -> BlockChain:
    chain = BlockChain(root_digest(IDENTITY) if root is None else root, block_size, extra_keys=keys)
    chain.extend(pack_tokens(tokens))
    return chain


def vectors_of_the_code() -> dict[str, str]:
    plain = chain_of(ONE_TO_NINE)
    salted = chain_of(ONE_TO_NINE, salt_key("tenant-ä"))
    extremes = chain_of(EXTREMES, salt_key("x"), ExtraKey(ExtraKeyKind.LORA, b"x", block_index=1))
    regions = chain_of(ONE_TO_NINE, *salt_keys(SaltRegions([(0, "a"), (2, "b"), (5, "c")]), 4))
    image = chain_of(ONE_TO_NINE, ExtraKey(ExtraKeyKind.MULTIMODAL, IMAGE, 1))
    rows = chain_of(ONE_TO_NINE, ExtraKey(ExtraKeyKind.PROMPT_EMBEDDING, ROWS, 1))
    root = root_digest(IDENTITY)
    scopes = Scopes()
    for _ in range(7):
        scopes.forget(salt_key("tenant-ä"))
    forgotten = chain_of(ONE_TO_NINE, *scopes.stamp([salt_key("tenant-ä")]))
    scopes.forget_prefix(plain.hashes[1], lambda name: True, None)
    after_prefix = chain_of(ONE_TO_NINE, scopes.prefix_stamp(plain.hashes[1], 1))
    vectors = {
        "root_empty": root_digest({}),
        "root_two_fields": root,
        "message0_plain": block_header(len(root), 4) + root + plain.contents[0],
        "block0_plain": plain.hashes[0],
        "block1_plain": plain.hashes[1],
        "block0_salt": salted.hashes[0],
        "block1_salt": salted.hashes[1],
        "block0_extremes": extremes.hashes[0],
        "block1_lora": extremes.hashes[1],
        "block0_regions": regions.hashes[0],
        "block1_regions": regions.hashes[1],
        "block0_adapter": chain_of(ONE_TO_NINE, lora_key(ADAPTER)).hashes[0],
        "block1_image": image.hashes[1],
        "block1_rows": rows.hashes[1],
        "block0_epoch_salt": forgotten.hashes[0],
        "block1_epoch_prefix": after_prefix.hashes[1],
    }
    return {name: data.hex() for name, data in vectors.items()}


def vectors_of_this_test() -> dict[str, str]:
    root = root_of(IDENTITY)
    plain = hashes_of(root, 4, ONE_TO_NINE, {})
    salted = hashes_of(root, 4, ONE_TO_NINE, {0: [(1, "tenant-ä".encode())]})
    extremes = hashes_of(root, 4, EXTREMES, {0: [(1, b"x")], 1: [(2, b"x")]})
    salt = "tenant-ä".encode()
    forgotten = hashes_of(root, 4, ONE_TO_NINE, {0: [(1, salt), (5, struct.pack("<QB", 7, 1) + salt)]})
    after_prefix = hashes_of(root, 4, ONE_TO_NINE, {1: [(5, struct.pack("<QB", 8, 0) + plain[1])]})
    vectors = {
        "root_empty": root_of({}),
        "root_two_fields": root,
        "message0_plain": message_of(root, [1, 2, 3, 4], []),
        "block0_plain": plain[0],
        "block1_plain": plain[1],
        "block0_salt": salted[0],
        "block1_salt": salted[1],
        "block0_extremes": extremes[0],
        "block1_lora": extremes[1],
        "block0_regions": hashes_of(root, 4, ONE_TO_NINE, {0: [(1, b"a"), (1, b"b")]})[0],
        "block1_regions": hashes_of(root, 4, ONE_TO_NINE, {0: [(1, b"a"), (1, b"b")], 1: [(1, b"c")]})[1],
        "block0_adapter": hashes_of(root, 4, ONE_TO_NINE, {0: [(2, bytes.fromhex(ADAPTER))]})[0],
        "block1_image": hashes_of(root, 4, ONE_TO_NINE, {1: [(3, IMAGE)]})[1],
        "block1_rows": hashes_of(root, 4, ONE_TO_NINE, {1: [(4, ROWS)]})[1],
        "block0_epoch_salt": forgotten[0],
        "block1_epoch_prefix": after_prefix[1],
    }
    return {name: data.hex() for name, data in vectors.items()}


def vectors_of_the_page() -> dict[str, str]:
    fenced = re.findall(r"^```vectors\n(.*?)^```", SPEC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return dict(line.split(": ") for block in fenced for line in block.splitlines() if line.strip())


GOLDEN = {
    "root_empty": "2ccc272242527bd36053b42489218edf17da1527ce7e9cad4d4db86418f5728a",
    "root_two_fields": "5bb1fe1b50abdceb07255fdaafb454336b2afc9d8d7a67e3bc8ff1dc4ff36040",
    "message0_plain": (
        "0120000000100000005bb1fe1b50abdceb07255fdaafb454336b2afc9d8d7a67e3bc8ff1dc4ff36040"
        "01000000020000000300000004000000"
    ),
    "block0_plain": "665ec30ceafd6865dda7bc6980d6614d460d88400b7c2620016e9c9e403054ba",
    "block1_plain": "61bbfa657140621ffd8959ab43b2ec0edeb8ae421836d969dd9da7b1d454447e",
    "block0_salt": "547363a2063ad9fbaa10f0ccb0db9aa5096469304e8e9191901a540eecfda238",
    "block1_salt": "721e0b66dffb645e6affcba67d2d00ec5c1e8d55f09aa8fbbfb2362f47a5258d",
    "block0_extremes": "46ff1e5a08132aafb9c231c735d6113afca6f3c070057e953c6fc3ed60a6ae1f",
    "block1_lora": "b44fe0ae0587655678cd13e501d29baf341788a61bdfe0fdf3e5a38fa957fbae",
    "block0_regions": "313c86a4690afebb12c3a8c8293a6237271852b57a1d23e791a616c2d5dc6a11",
    "block1_regions": "65987563f607d657a707164e5895bb8a7df8b2caf3a9141ef1cfe2ab66f7c891",
    "block0_adapter": "8f5c28de3e6d8f940d95a54ba54b86b5ce2d9f611d03c634e19d8a93c9497dfe",
    "block1_image": "6112a751893a4b66bb95543a879216990d74cc878c07339360dfd003013ce54a",
    "block1_rows": "2b5e12e83a88cbda725da9dd2e2530da6e6257ffc8fd5024adc8ea74c712ba8c",
    "block0_epoch_salt": "c678b00da32ddd3436352f456e256d20801beaac022f48641aa71b771e88eb60",
    "block1_epoch_prefix": "8e71f7ca6fb2a3cca2712f236ad5a4bf52cb8068ef6f1188a457ef1dd990b262",
}
"""These change only with the format's version: whatever was stored or shared under the old ones is then lost."""


def test_golden_vectors_of_the_code() -> None:
    assert vectors_of_the_code() == GOLDEN


def test_golden_vectors_of_a_second_implementation() -> None:
    assert vectors_of_this_test() == GOLDEN


def test_golden_vectors_of_the_published_page() -> None:
    assert vectors_of_the_page() == GOLDEN


# -- what the format promises ------------------------------------------------------------------------------------------

tokens_strategy = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2), min_size=2, max_size=2)
keys_strategy = st.lists(st.tuples(st.sampled_from(list(ExtraKeyKind)), st.binary(max_size=9)), max_size=3)
block_strategy = st.tuples(st.binary(max_size=9), tokens_strategy, keys_strategy)


def message_of_the_code(block: tuple[bytes, list[int], Keys]) -> bytes:
    parent, tokens, keys = block
    messages: list[bytes] = []

    class Recorded:
        def __init__(self, data: bytes) -> None:
            messages.append(data)

        def digest(self) -> bytes:
            return b""

    def record(data: bytes) -> Digest:
        return Recorded(data)

    extra_keys = [ExtraKey(ExtraKeyKind(kind), payload) for kind, payload in keys]
    BlockChain(parent, len(tokens), record, extra_keys).extend(pack_tokens(tokens))
    return messages[0]


@given(block_strategy, block_strategy)
@settings(deadline=None, derandomize=True, database=None)
def test_different_blocks_have_different_messages(
    one: tuple[bytes, list[int], Keys], other: tuple[bytes, list[int], Keys]
) -> None:
    same = one[:2] == other[:2] and sorted(one[2]) == sorted(other[2])
    assert (message_of_the_code(one) == message_of_the_code(other)) == same
    assert message_of_the_code(one) == message_of(one[0], one[1], one[2])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"", [97, 0]), (b"a\0\0\0", [0])),  # bytes move from the tokens to the parent
        ((b"p", [1, 2]), (b"p", [2, 1])),
        ((b"p", [1, 2]), (b"p", [1, 2, 0])),
        ((b"p", [256]), (b"p", [1])),
    ],
)
def test_bytes_that_move_from_field_to_field_change_the_message(
    one: tuple[bytes, list[int]], other: tuple[bytes, list[int]]
) -> None:
    assert message_of_the_code((*one, [])) != message_of_the_code((*other, []))


identity_strategy = st.tuples(
    st.lists(st.integers(0, 1), min_size=4, max_size=6),
    st.dictionaries(
        st.integers(0, 2),
        st.lists(st.tuples(st.sampled_from(list(ExtraKeyKind)), st.sampled_from([b"", b"a", b"b", b"\x01\0\0\0\0"]))),
        max_size=2,
    ),
)


@given(identity_strategy, identity_strategy)
@settings(deadline=None, derandomize=True, database=None)
def test_hashes_agree_just_as_far_as_identities_do(
    one: tuple[list[int], dict[int, Keys]], other: tuple[list[int], dict[int, Keys]]
) -> None:
    def made(identity: tuple[list[int], dict[int, Keys]]) -> list[bytes]:
        tokens, by_block = identity
        keys = [
            ExtraKey(ExtraKeyKind(kind), payload, index) for index, keys in by_block.items() for kind, payload in keys
        ]
        hashes = list[bytes](chain_of(tokens, *keys, block_size=2).hashes)
        assert hashes == hashes_of(root_of(IDENTITY), 2, tokens, by_block)
        return hashes

    def known(identity: tuple[list[int], dict[int, Keys]]) -> list[object]:
        tokens, by_block = identity
        return [(tokens[i * 2 : i * 2 + 2], sorted(by_block.get(i, []))) for i in range(len(tokens) // 2)]

    shared = 0
    for mine, theirs in zip(known(one), known(other), strict=False):
        if mine != theirs:
            break
        shared += 1
    ours, others = made(one), made(other)
    assert ours[:shared] == others[:shared]
    assert set(ours[shared:]).isdisjoint(others)
    assert set(others[shared:]).isdisjoint(ours)


def test_a_tokens_bytes_never_pass_for_an_extra_key() -> None:
    key = ExtraKey(ExtraKeyKind.SALT, b"abc")
    data = encode_extra_keys([key])  # 8 bytes: as long as two tokens
    tokens = [1, 2, *struct.unpack("<II", data)]
    with_key = chain_of([1, 2], key, root=b"", block_size=2)
    assert encode_tokens(pack_tokens(tokens)) == with_key.contents[0]
    assert chain_of(tokens, root=b"", block_size=4).hashes != with_key.hashes


def test_the_kind_tells_equal_payloads_apart_and_the_order_of_keys_does_not_matter() -> None:
    hashes = {chain_of([1] * 4, ExtraKey(kind, b"x")).hashes[0] for kind in ExtraKeyKind}
    assert len(hashes) == len(ExtraKeyKind)
    one, other = salt_key("a"), ExtraKey(ExtraKeyKind.LORA, b"b")
    assert chain_of([1] * 4, one, other).hashes == chain_of([1] * 4, other, one).hashes


def test_two_keys_never_pass_for_one() -> None:
    two = [ExtraKey(ExtraKeyKind.SALT, b"a"), ExtraKey(ExtraKeyKind.SALT, b"b")]
    glued = ExtraKey(ExtraKeyKind.SALT, b"a" + encode_extra_keys(two[1:]))
    assert encode_extra_keys(two) != encode_extra_keys([glued])


def test_a_salt_enters_block_0_alone_and_the_chain_carries_it_to_every_later_block() -> None:
    plain, salted = chain_of(ONE_TO_NINE), chain_of(ONE_TO_NINE, salt_key("s"))
    assert salted.contents[0] == plain.contents[0] + b"\x01" + u32(1) + b"s"
    assert salted.contents[1] == plain.contents[1]
    assert all(mine != theirs for mine, theirs in zip(salted.hashes, plain.hashes, strict=True))


def test_an_extra_key_of_a_later_block_leaves_the_blocks_before_it_alone() -> None:
    plain = chain_of(ONE_TO_NINE)
    keyed = chain_of(ONE_TO_NINE, ExtraKey(ExtraKeyKind.MULTIMODAL, b"image", block_index=1))
    assert keyed.hashes[0] == plain.hashes[0]
    assert keyed.hashes[1] != plain.hashes[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [("\u00e9", "e\u0301"), ("a", "\u0430"), ("\ufb01", "fi"), ("K", "\u212a"), ("a", "a\u200b"), ("a", "A")],
)
def test_salts_that_look_alike_differ(one: str, other: str) -> None:
    assert salt_key(one) != salt_key(other)
    assert chain_of([1] * 4, salt_key(one)).hashes != chain_of([1] * 4, salt_key(other)).hashes


@pytest.mark.parametrize("salt", ["", None, 1, b"salt", True, ["a"], "\ud800"])
def test_a_salt_that_is_no_text_is_refused(salt: object) -> None:
    with pytest.raises(InvalidParameterError, match="cache_salt"):
        salt_key(salt)  # type: ignore[arg-type]


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(chain_of([7] * length).hashes) for length in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5))
@settings(deadline=None, derandomize=True, database=None)
def test_a_chain_extended_bit_by_bit_is_the_chain_made_at_once(
    tokens: list[int], pieces: list[int], block_size: int
) -> None:
    keys = [salt_key("s"), ExtraKey(ExtraKeyKind.MULTIMODAL, b"m", block_index=2)]
    whole = chain_of(tokens, *keys, block_size=block_size)
    bit_by_bit = BlockChain(root_digest(IDENTITY), block_size, extra_keys=keys)
    known: array[int] = array("I")
    for piece in [*pieces, len(tokens)]:
        known.extend(pack_tokens(tokens[len(known) : len(known) + piece]))
        bit_by_bit.extend(known)
    assert bit_by_bit.hashes == whole.hashes
    assert bit_by_bit.contents == whole.contents
    assert whole.hashes == hashes_of(
        root_of(IDENTITY), block_size, tokens, {0: [(1, b"s")], 2: [(ExtraKeyKind.MULTIMODAL, b"m")]}
    )


def test_common_blocks_compares_contents_and_never_hashes() -> None:
    one, other = chain_of([1, 2, 3, 4, 5, 6], block_size=2), chain_of([1, 2, 3, 4, 9, 9], block_size=2)
    assert one.common_blocks(other, 9) == other.common_blocks(one, 9) == 2
    assert one.common_blocks(other, 1) == 1
    assert one.common_blocks(chain_of([1, 2, 3, 4, 5, 6], salt_key("s"), block_size=2), 9) == 0
    assert one.common_blocks(chain_of([1, 2, 3, 4, 5, 6], root=b"else", block_size=2), 9) == 0
    assert one.common_blocks(chain_of([1, 2, 3], block_size=2), 9) == 1


# -- the root ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 1.0, True, None, b"1", ["1"]])
def test_an_identity_of_anything_but_strings_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="strings only"):
        root_digest({"weights": value})  # type: ignore[dict-item]


def test_a_field_name_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="strings only"):
        root_digest({1: "x"})  # type: ignore[dict-item]


def test_the_order_of_fields_does_not_matter_and_every_name_and_value_does() -> None:
    assert root_digest({"a": "1", "b": "2"}) == root_digest({"b": "2", "a": "1"})
    roots = [{}, {"a": ""}, {"": "a"}, {"a": "1"}, {"a": "1", "b": ""}, {"a": "1b"}, {"a1": "b"}, {"a": "b1"}]
    assert len({root_digest(identity) for identity in roots}) == len(roots)


def test_hashes_are_of_the_whole_message_however_many_blocks_are_hashed_at_once_and_by_whatever_function() -> None:
    tokens, root = list(range(4 * 70)), root_digest(IDENTITY)
    chains = [BlockChain(root, 4), BlockChain(root, 4, lambda data: sha256(data))]
    for chain in chains:
        for stop in (4, 12, 17, 280):
            chain.extend(pack_tokens(tokens[:stop]))
        assert chain.hashes == hashes_of(root, 4, tokens, {})


def test_a_block_hash_never_equals_a_root_of_the_same_bytes() -> None:
    """A root's message begins with its tag, a block's with its version."""
    assert message_of_the_code((b"", [1, 2], []))[0] == 1
    assert b"anaphora/root"[0] != 1
