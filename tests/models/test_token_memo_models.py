"""Real tokenizers through the memo: the same tokens, whatever the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anaphora.engine.pieces import Pieces
from anaphora.engine.token_memo import MemoEncoder, TokenMemo

pytestmark = pytest.mark.models

SPECIALS = {
    "smollm2-135m": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"],
    "gemma3-270m": ["<start_of_turn>", "<end_of_turn>", "<bos>", "<unused1>", "<unused12>", "[multimodal]", "<eos>"],
}
FRAGMENTS = [
    *(
        "<|im",
        "|>",
        "<",
        ">",
        "<unused",
        "of_turn>",
        "user\n",
        "\n",
        "\n\n\n",
        " ",
        "    ",
        "\t",
        "\u2581",
        "\u2581\u2581",
    ),
    *(
        "<h1>",
        "</h1>",
        "1,024",
        "caf\u00e9",
        "e\u0301",
        "\u6f6e\u6c50",
        "\U0001f30a",
        "\uff1cbos\uff1e",
        "The tide table.",
        " a",
    ),
]


@pytest.fixture(scope="module", params=SPECIALS)
def known(request: pytest.FixtureRequest, tokenizer_of: Callable[[str], Any]) -> tuple[Any, Pieces, list[str]]:
    tokenizer = tokenizer_of(request.param)
    return tokenizer, Pieces(tokenizer), SPECIALS[request.param]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), add_special_tokens=st.booleans())
def test_tokens_are_the_tokenizers_own(
    known: tuple[Any, Pieces, list[str]], data: st.DataObject, add_special_tokens: bool
) -> None:
    tokenizer, pieces, specials = known
    fragment = st.sampled_from(specials) | st.sampled_from(FRAGMENTS) | st.text(max_size=8)
    texts = data.draw(st.lists(st.lists(fragment, max_size=14).map("".join), min_size=1, max_size=2))
    encoder = MemoEncoder(tokenizer, pieces, TokenMemo(1 << 20))
    for text in [*texts, *texts]:
        expected = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert encoder.encode(text, add_special_tokens=add_special_tokens, domain="") == expected


def test_a_rendered_chat_is_cut_at_every_message(known: tuple[Any, Pieces, list[str]]) -> None:
    tokenizer, pieces, specials = known
    begin, end = specials[:2]
    begin_id, end_id = tokenizer.convert_tokens_to_ids([begin, end])
    text = "".join(f"{begin}{role}\n{role} says so{end}\n" for role in ("user", "model"))
    assert pieces.split(text) == [
        *(begin_id, "user\nuser says so", end_id, "\n"),
        *(begin_id, "model\nmodel says so", end_id, "\n"),
    ]
