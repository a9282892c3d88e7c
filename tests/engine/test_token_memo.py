"""Claims: tokens through the memo are the tokenizer's own, whatever the text; the memo is bounded and keeps domains
apart; tokenizers that look beyond a piece are left alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from piece_tokenizers import BEGIN, BOS, END, KINDS, byte_level_bpe, stripped_words, unigram_metaspace
from tokenizers import AddedToken, normalizers, pre_tokenizers

from anaphora.engine.pieces import NotPiecewiseError, Pieces
from anaphora.engine.token_memo import MAX_PIECES, MemoEncoder, TokenMemo, memo_encoder

FRAGMENTS = [
    *(
        BEGIN,
        END,
        BOS,
        "<|",
        "|>",
        "<|be",
        "<|begin",
        "begin|>",
        "<s",
        "s>",
        "<left>",
        "<right>",
        "word",
        "Moon",
        "moon",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\u00a0",
        "\u2028",
        "\u3000",
        "\u2581",
        "\u0301",
        "\uff1cs\uff1e",
        "the",
        "The tide",
        "1,024",
    ),
    *("<|begin|>user\n", "<|end|>\n", "caf\u00e9", "e\u0301", "\u6f6e", "_", "[SEP]", "\U0001f30a", "\x1c", "\x85"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=14).map("".join)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def tokenizer(request: pytest.FixtureRequest) -> tuple[Any, Pieces]:
    made = KINDS[request.param]()
    return made, Pieces(made)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), add_special_tokens=st.booleans())
def test_tokens_are_the_tokenizers_own(
    tokenizer: tuple[Any, Pieces], texts: list[str], add_special_tokens: bool
) -> None:
    encoder = MemoEncoder(*tokenizer, TokenMemo(1 << 20))
    for text in [*texts, *texts]:
        expected = tokenizer[0].encode(text, add_special_tokens=add_special_tokens)
        assert encoder.encode(text, add_special_tokens=add_special_tokens, domain="") == expected


def test_every_kind_is_cut_at_its_special_tokens(tokenizer: tuple[Any, Pieces]) -> None:
    ids = tokenizer[0].convert_tokens_to_ids([BEGIN, END])
    assert tokenizer[1].split(f"a{BEGIN}b c{END}") == ["a", ids[0], "b c", ids[1]]


class Counting:
    """A tokenizer that notes what it is asked to encode."""

    def __init__(self, tokenizer: Any) -> None:
        self.asked: list[str] = []
        self.encode_itself = tokenizer.encode
        self.encode = self._encode

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.asked.append(text)
        return self.encode_itself(text, add_special_tokens=add_special_tokens)


def counting_encoder(max_bytes: int = 1 << 20) -> tuple[MemoEncoder, Counting, TokenMemo]:
    tokenizer = byte_level_bpe()
    memo = TokenMemo(max_bytes)
    encoder = MemoEncoder(tokenizer, Pieces(tokenizer), memo)
    encoder._tokenizer = counting = Counting(tokenizer)
    return encoder, counting, memo


def test_a_conversation_that_grew_is_tokenised_from_its_new_message_on() -> None:
    encoder, counting, _ = counting_encoder()
    turn = f"{BEGIN}user\nhello{END}\n"
    encoder.encode(turn, add_special_tokens=False, domain="")
    assert counting.asked == ["user\nhello", "\n"]
    encoder.encode(f"{turn}{BEGIN}assistant\nyes{END}\n", add_special_tokens=False, domain="")
    assert counting.asked == ["user\nhello", "\n", "assistant\nyes"]


def test_a_domain_finds_nothing_of_another() -> None:
    encoder, counting, memo = counting_encoder()
    for domain in ("", "a", "b", "", "a", "b"):
        encoder.encode("hello", add_special_tokens=False, domain=domain)
    assert counting.asked == ["hello"] * 3
    assert len(memo) == 3


def test_the_memo_keeps_what_was_used_last_within_its_bytes() -> None:
    encoder, counting, memo = counting_encoder(max_bytes=2000)
    for text in ("one", "two", "three"):
        encoder.encode(text, add_special_tokens=False, domain="")
    assert len(memo) == 3
    encoder.encode("one", add_special_tokens=False, domain="")  # used again
    for text in ("four", "five", "one", "two"):
        encoder.encode(text, add_special_tokens=False, domain="")
        assert 0 < memo.num_bytes <= 2000
    assert counting.asked == ["one", "two", "three", "four", "five", "two"]


def test_what_is_larger_than_the_memo_is_not_kept() -> None:
    encoder, _, memo = counting_encoder(max_bytes=2000)
    encoder.encode("x", add_special_tokens=False, domain="")
    encoder.encode("y" * 3000, add_special_tokens=False, domain="")
    assert len(memo) == 1


def test_a_text_of_very_many_pieces_is_tokenised_as_a_whole_and_not_kept() -> None:
    encoder, counting, memo = counting_encoder()
    text = BEGIN * (MAX_PIECES + 1)
    ids = encoder.encode(text, add_special_tokens=False, domain="")
    assert ids == counting.encode_itself(text, add_special_tokens=False)
    assert (counting.asked, len(memo)) == ([text], 0)


def with_dropout() -> Any:
    tokenizer = byte_level_bpe()
    tokenizer.backend_tokenizer.model.dropout = 0.5
    return tokenizer


def with_truncation() -> Any:
    tokenizer = byte_level_bpe()
    tokenizer.backend_tokenizer.enable_truncation(8)
    return tokenizer


def with_split_specials() -> Any:
    tokenizer = byte_level_bpe()
    tokenizer.split_special_tokens = True
    return tokenizer


def with_custom_normalizer() -> Any:
    class First:
        def normalize(self, text: Any) -> None:
            text.lowercase()

    tokenizer = byte_level_bpe()
    tokenizer.backend_tokenizer.normalizer = normalizers.Normalizer.custom(First())
    return tokenizer


def with_own_encode() -> Any:
    tokenizer = byte_level_bpe()
    kind = type(tokenizer)

    class Own(kind):  # type: ignore[misc, valid-type]
        def encode(self, text: str, **options: Any) -> Any:
            return super().encode(text.upper(), **options)

    tokenizer.__class__ = Own
    return tokenizer


def with_first_word_marked() -> Any:
    tokenizer = byte_level_bpe()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: unigram_metaspace("first"), "first word"),
        (with_first_word_marked, "first word"),
        (with_dropout, "at random"),
        (with_truncation, "truncates"),
        (with_split_specials, "splits special tokens"),
        (with_custom_normalizer, "described"),
        (with_own_encode, "its encode is its own"),
        (object, "none of the tokenizers library"),
    ],
)
def test_a_tokenizer_that_looks_beyond_a_piece_is_left_alone(
    make: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make()
    with pytest.raises(NotPiecewiseError, match=why):
        Pieces(tokenizer)
    with caplog.at_level(logging.INFO):
        assert memo_encoder(tokenizer, 1000) is None
    assert why in caplog.text


def test_no_tokenizer_or_no_bytes_is_no_memo() -> None:
    assert memo_encoder(None, 1000) is None
    assert memo_encoder(byte_level_bpe(), 0) is None


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_special_tokens_that_take_or_see_what_is_beside_them_are_no_place_to_cut(flag: str) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<x>", normalized=False, special=True, **{flag: True})]}
    )
    assert Pieces(tokenizer).split(f"a <x> b{BEGIN}") == ["a <x> b", tokenizer.convert_tokens_to_ids(BEGIN)]


def test_an_added_token_that_overlaps_a_special_one_is_seen() -> None:
    tokenizer = stripped_words()
    (end_id,) = tokenizer.convert_tokens_to_ids([END])
    text = f"x|>{BOS}y{END}"  # `|><` comes first, so there is no `<s>`
    assert Pieces(tokenizer).split(text) == [f"x|>{BOS}y", end_id]
    assert tokenizer.convert_tokens_to_ids("|><") in tokenizer.encode(text)


def test_a_special_token_that_ends_in_a_letter_is_no_place_to_cut_beside_tokens_that_look_at_words() -> None:
    tokenizer = stripped_words()
    letters = [AddedToken("<x>a", normalized=False, special=True)]
    tokenizer.add_special_tokens({"additional_special_tokens": letters})
    text = f"<x>aword{BEGIN}word"  # `word` is an added token where it stands alone
    begin_id, word_id = tokenizer.convert_tokens_to_ids([BEGIN, "word"])
    assert Pieces(tokenizer).split(text) == ["<x>aword", begin_id, "word"]
    assert tokenizer.encode(text).count(word_id) == 1
