"""Claim: text given out token by token adds up to one decode of all tokens, whatever the tokens' borders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from anaphora.engine.detokenizer import Detokenizer

# GPT-2's printable stand-ins for bytes, in byte order
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_STAND_INS = {byte: chr(byte) for byte in _PRINTABLE}
_STAND_INS |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in _STAND_INS)}


class Decoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def encode(self, text, *, add_special_tokens=True):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids, *, skip_special_tokens=False):
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def byte_level(pieces: list[bytes]) -> Decoder:
    """A byte-level BPE tokenizer with exactly these tokens; the one after them is a special `<s>`."""
    names = ["".join(_STAND_INS[byte] for byte in piece) for piece in pieces]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Decoder(tokenizer)


def byte_fallback(words: list[str]) -> Decoder:
    """Llama's kind: `▁` for spaces, the first one stripped; unknown characters as tokens of one byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Decoder(tokenizer)


def pieces_of(decoder: Decoder, token_ids: list[int], prompt: list[int] = (), **options) -> list[str]:
    detokenizer = Detokenizer(decoder, prompt, **options)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


_TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aé€😀你\u0301 \ufffd")), max_size=60
)


@given(_TEXTS, st.data())
def test_any_split_of_any_text_gives_the_text_and_never_half_a_character(text, data):
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(encoded) - 1)))) | {0, len(encoded)})
    chunks = [encoded[a:b] for a, b in itertools.pairwise(cuts) if encoded[a:b]]
    tokens = sorted(set(chunks))
    decoder = byte_level(tokens)
    given_out = pieces_of(decoder, [tokens.index(chunk) for chunk in chunks])
    assert "".join(given_out) == text
    assert "".join(given_out).count("\ufffd") == text.count("\ufffd")


_PIECES = [bytes([byte]) for byte in range(256)]
_PIECES += [
    b" the",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xa5\xbd\xe4",
    b"\xbd\xa0\xe5",
    b"ab\xe2",
    b"\x82\xac",
    b"  ",
    b"\xef\xbf\xbd",
]
_ALL_BYTES = byte_level(_PIECES)
_IDS = st.lists(
    st.one_of(st.integers(0, len(_PIECES)), st.sampled_from([0x61, 0xE2, 0x82, 0xF0, 0x9F]), st.integers(256, 265)),
    max_size=120,
)


@given(_IDS, _IDS)
def test_any_bytes_give_what_one_decode_gives_behind_any_prompt(prompt, token_ids):
    prompt = [*prompt, 0x61]  # a prompt that ends inside a character would leave its end to the output
    whole = _ALL_BYTES.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces_of(_ALL_BYTES, token_ids, prompt)) == whole


def test_a_prompt_that_ends_inside_a_character_is_no_context():
    assert "".join(pieces_of(_ALL_BYTES, [0x9F, 0x98, 0x80, 0x61], [0x61, 0xF0])) == "\ufffd\ufffd\ufffda"


@pytest.mark.parametrize("num_garbage", range(24, 40))
def test_a_character_behind_a_long_run_of_garbage_is_whole(num_garbage):
    ids = [0x61, *[0xFF] * num_garbage, *"😀".encode(), 0x62]
    given_out = pieces_of(_ALL_BYTES, ids)
    assert "".join(given_out) == "a" + "\ufffd" * num_garbage + "😀b"
    assert "".join(given_out[:num_garbage]).startswith("a" + "\ufffd" * 20 if num_garbage > 32 else "a")


def test_text_is_given_out_as_soon_as_it_is_certain():
    ids = [*"né".encode(), *"€".encode(), 0xFF, 0x61]
    assert pieces_of(_ALL_BYTES, ids) == ["n", "", "é", "", "", "€", "", "\ufffda", ""]


def test_an_unfinished_character_shows_at_the_end():
    assert pieces_of(_ALL_BYTES, [0x61, 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


def test_characters_before_an_unfinished_one_are_not_held_back():
    ab_e2, rest = _PIECES.index(b"ab\xe2"), _PIECES.index(b"\x82\xac")
    assert pieces_of(_ALL_BYTES, [ab_e2, rest]) == ["ab", "€", ""]


@pytest.mark.parametrize(
    ("prompt", "text"), [([], "hello world"), ([258], " hello world"), ([258, 259], " hello world")]
)
def test_a_leading_space_stays_behind_a_prompt_and_goes_without_one(prompt, text):
    decoder = byte_fallback(["▁hello", "▁world", "Say"])  # 256, 257, 258; the special token is 259
    assert "".join(pieces_of(decoder, [256, 257], prompt)) == text


def test_skipped_special_tokens_do_not_eat_the_space_behind_them():
    decoder = byte_fallback(["▁hello", "▁world"])
    ids = [256, *[258] * 40, 257]
    assert "".join(pieces_of(decoder, ids)) == "hello world"
    assert "".join(pieces_of(decoder, [256, 258, 257], skip_special_tokens=False)) == "hello<s> world"


def test_byte_fallback_characters_of_several_tokens():
    decoder = byte_fallback(["▁hello"])
    assert pieces_of(decoder, [256, *"€😀".encode(), 256]) == [
        "hello", "", "", "€", "", "", "", "😀", " hello", ""
    ]  # fmt: skip


@pytest.mark.parametrize(
    "token_id", [0x61, 0xFF, 0xE2, 256, len(_PIECES)], ids=["a", "never", "begun", "the", "special"]
)
def test_the_work_for_a_token_does_not_grow_with_the_output(token_id):
    decoder = byte_level(_PIECES)
    decoder.num_decoded = 0
    pieces_of(decoder, [0x61, *[token_id] * 3000])
    assert decoder.num_decoded < 3000 * 40
