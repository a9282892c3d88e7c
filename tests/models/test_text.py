"""Real tokenizers, token by token: the text of the prompt and what is given out add up to one decode of everything."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from anaphora.engine.detokenizer import Detokenizer

pytestmark = pytest.mark.models

TEXTS = (
    "Hello world, this is  a test.\n\n  indented",
    "emoji 😀👩\u200d👩\u200d👧 你好世界 naïve – “quoted” Ωμέγα العربية",
    "🇩🇪 ﷽ a\u0301 \ufffd",
)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_pieces_add_up_to_one_decode(tokenizer_of: Callable[[str], Any], name: str) -> None:
    tokenizer = tokenizer_of(name)
    rng = random.Random(0)
    prompt = tokenizer.encode("Say: hi")
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    outputs += [[rng.randrange(len(tokenizer)) for _ in range(60)] for _ in range(100)]
    for token_ids in outputs:
        detokenizer = Detokenizer(tokenizer, prompt)
        text = "".join([*map(detokenizer.add, token_ids), detokenizer.flush()])
        whole = tokenizer.decode([*prompt, *token_ids], skip_special_tokens=True)
        assert tokenizer.decode(prompt, skip_special_tokens=True) + text == whole
