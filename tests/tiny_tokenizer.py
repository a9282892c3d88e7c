"""A tokenizer for the tiny model: one token a byte, and an end token."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 256


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte b has the id of its place in the alphabet of byte-level BPE; the end token has END."""
    vocab = {letter: token_id for token_id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
