"""The memo of tokenised text behind the endpoints: what grows is tokenised from its new part on, by domain, and the
replies are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from server_world import Live, make_tokenizer, serving

from anaphora.engine.engine import Engine
from anaphora.server.config import ServerConfig
from anaphora.server.tenants import ApiKeys, Caller

OPEN, CLOSE = "(300)", "(301)"  # texts of the tiny vocabulary, made special tokens here
TEMPLATE = (
    "<s>{% for message in messages %}(300){{ message['role'] }}\n{{ message['content'] }}(301)\n{% endfor %}"
    "{% if add_generation_prompt %}(300)assistant\n{% endif %}"
)
FIRST = [{"role": "user", "content": "What is a tide table?"}]
SECOND = [*FIRST, {"role": "assistant", "content": "A table."}, {"role": "user", "content": "Of what?"}]


class Serving:
    """A server whose tokenizer notes what it encodes."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.encoded: list[str] = []
        self.tokenizer = live.engine.tokenizer
        direct = self.tokenizer.encode  # type: ignore[union-attr]

        def encode(text: str, **options: Any) -> list[int]:
            self.encoded.append(text)
            return direct(text, **options)

        self.tokenizer.encode = encode  # type: ignore[method-assign, union-attr]

    def chat(self, messages: Any, **body: Any) -> dict[str, Any]:
        """A short answer, and what was tokenised for it."""
        self.encoded.clear()
        reply = self.live.post(
            "/v1/chat/completions",
            **({"messages": messages, "max_tokens": 2, "temperature": 0, "return_token_ids": True} | body),
        )
        return reply  # type: ignore[no-any-return]


@contextmanager
def chatting(
    make_engine: Callable[..., Engine], config: ServerConfig | None = None, **options: Any
) -> Iterator[Serving]:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [OPEN, CLOSE]})
    tokenizer.chat_template = TEMPLATE
    with serving(make_engine(tokenizer=tokenizer), config, **options) as live:
        yield Serving(live)


def test_a_conversation_that_grew_is_tokenised_from_its_new_messages_on(make_engine: Callable[..., Engine]) -> None:
    with chatting(make_engine) as server, chatting(make_engine, ServerConfig(token_memo_bytes=0)) as without:
        server.chat(FIRST)
        assert server.encoded == ["user\nWhat is a tide table?", "\n", "assistant\n"]
        reply = server.chat(SECOND)
        assert server.encoded == ["assistant\nA table.", "user\nOf what?"]
        right = without.chat(SECOND)
        assert len(without.encoded) == 1  # the whole text
        assert reply["prompt_token_ids"] == right["prompt_token_ids"]
        assert reply["choices"] == right["choices"]
        whole = server.live.post("/tokenize", messages=SECOND)
        assert whole["tokens"] == reply["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "the tide table", "max_tokens": 1}),
        ("/v1/responses", {"input": "the tide table", "max_output_tokens": 1}),
        ("/v1/embeddings", {"input": "the tide table"}),
    ],
)
def test_every_endpoint_that_reads_text_uses_it_by_salt(
    make_engine: Callable[..., Engine], path: str, body: dict[str, Any]
) -> None:
    with chatting(make_engine) as server:
        asked = []
        for salt in (None, None, "a", "a", "b", None):
            server.encoded.clear()
            server.live.post(path, **body, cache_salt=salt)
            asked.append(bool(server.encoded))
        assert asked == [True, False, True, False, True, False]


def test_tenants_have_a_memo_of_their_own_unless_they_share(make_engine: Callable[..., Engine]) -> None:
    keys = ApiKeys([(name, Caller(name, is_admin=False)) for name in ("anna", "berta", "cleo")])
    config = ServerConfig(share_cache=(frozenset(("berta", "cleo")),))
    with chatting(make_engine, config, api_keys=keys) as server:
        asked = []
        for name in ("anna", "anna", "berta", "cleo", "anna"):
            server.chat(FIRST, headers={"authorization": f"Bearer {name}"})
            asked.append(bool(server.encoded))
        assert asked == [True, False, True, False, False]


def test_tokenize_neither_reads_nor_writes_it(make_engine: Callable[..., Engine]) -> None:
    with chatting(make_engine) as server:
        for _ in range(2):
            server.encoded.clear()
            server.live.post("/tokenize", messages=FIRST)
            assert len(server.encoded) == 1
        server.chat(FIRST)
        assert len(server.encoded) == 3
