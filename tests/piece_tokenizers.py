"""Small trained tokenizers of several kinds, for the tests of pieces and their memo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END, BOS = "<|begin|>", "<|end|>", "<s>"
SPECIALS = [BEGIN, END, BOS]
CORPUS = [
    "user\nWhat is a tide table? It lists high and low water, hour by hour.\n",
    "assistant\nA table of tides: 1,024 lines; the moon, the sun; caf\u00e9 \u00fcber na\u00efve \u6f6e\u6c50.\n",
    "begin end begin end <| |> s begin|end\n  the  the\tthe\n\n",
] * 3


def _wrap(tokenizer: Tokenizer) -> Any:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _with_bos(tokenizer: Tokenizer) -> Any:
    wrapped = _wrap(tokenizer)
    backend = wrapped.backend_tokenizer
    bos = [(BOS, backend.token_to_id(BOS))]
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=bos)
    return wrapped


def byte_level_bpe() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return _with_bos(tokenizer)


def byte_level_bpe_with_prefix_space() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return _wrap(tokenizer)


def unigram_metaspace(scheme: str = "always") -> Any:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return _with_bos(tokenizer)


def stripped_words() -> Any:
    """A normaliser that strips, beside tokens that take spaces, look at words, or are found after normalising only."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Lowercase(), normalizers.Replace("the", "a")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(vocab_size=200, special_tokens=["<unk>"]))
    tokenizer.add_tokens(
        [
            AddedToken("<left>", normalized=False, lstrip=True),
            AddedToken("<right>", normalized=False, rstrip=True),
            AddedToken("word", normalized=False, single_word=True),
            AddedToken("Moon", normalized=True, lstrip=True, rstrip=True),
            AddedToken("<|be", normalized=False),  # begins where a special token does
            AddedToken("|><", normalized=False),
            AddedToken("\n\n", normalized=False),
        ]
    )
    return _wrap(tokenizer)


def legacy_llama() -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.train_from_iterator(
        [text.replace(" ", "\u2581") for text in CORPUS],
        trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]),
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _with_bos(tokenizer)


def bert() -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials))
    sep, cls = (("[SEP]", tokenizer.token_to_id("[SEP]")), ("[CLS]", tokenizer.token_to_id("[CLS]")))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return _wrap(tokenizer)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level BPE": byte_level_bpe,
    "byte-level BPE, prefix space": byte_level_bpe_with_prefix_space,
    "Unigram, Metaspace": unigram_metaspace,
    "Unigram, Metaspace never": lambda: unigram_metaspace("never"),
    "words, stripped": stripped_words,
    "legacy Llama": legacy_llama,
    "BERT": bert,
}
