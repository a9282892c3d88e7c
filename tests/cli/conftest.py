"""A tiny model folder with a tokenizer and a chat template, so that text works without real weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_llama import VOCAB_SIZE, make_tiny_llama

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte; ids above the 256 bytes decode to `(id)`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate(alphabet)}
    vocab |= {f"({index})": index for index in range(len(alphabet), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_llama().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return folder
