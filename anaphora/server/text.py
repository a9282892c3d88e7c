"""Text to tokens and back for requests, with the checks that come before any work. Runs on worker threads.

Knows a tokenizer and an engine's limits; must not know HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from anaphora.engine.chat_template import Message, render_chat
from anaphora.engine.engine import Engine
from anaphora.engine.image_parts import as_parts
from anaphora.engine.prompt_check import check_text, check_token_ids
from anaphora.engine.token_memo import memo_encoder
from anaphora.errors import InvalidParameterError
from anaphora.server.tool_calls import reads_template


class TextTools:
    """Any thread may call it. memo_bytes: for the tokens of pieces of text that may come again. Raises RequestError.

    memo_domain, in calls: who may learn from their time what was tokenised before, as with cached beginnings; None uses
    no memo.
    """

    def __init__(self, engine: Engine, *, memo_bytes: int = 0) -> None:
        self.engine = engine
        self.tokenizer: Any = engine.tokenizer
        self._bos_token: str | None = getattr(self.tokenizer, "bos_token", None)
        self._bos_token_id: int | None = getattr(self.tokenizer, "bos_token_id", None)
        self.template_reads_tools = "tools" in str(getattr(self.tokenizer, "chat_template", None) or "")
        self.writes_tool_calls = reads_template(getattr(self.tokenizer, "chat_template", None))
        if self.tokenizer is not None:  # the first call settles its truncation state, which no later call then changes
            self.tokenizer.encode("a", add_special_tokens=False)
        self._memo = memo_encoder(self.tokenizer, memo_bytes)
        with contextlib.suppress(InvalidParameterError):  # the first rendering compiles the template, if there is one
            self.render(
                [{"role": "user", "content": "a"}], tools=None, add_generation_prompt=True, template_options=None
            )

    def prompt_ids(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, memo_domain: str | None = None
    ) -> list[int]:
        """A prompt as token ids that the engine can hold."""
        if isinstance(prompt, str):
            token_ids = self.encode(prompt, add_special_tokens=add_special_tokens, memo_domain=memo_domain)
        else:
            self.engine.check_fits(len(prompt))  # before anything looks at each token
            token_ids = list(prompt)
        token_ids = check_token_ids(token_ids, self.engine.vocab_size)
        self.engine.check_fits(len(token_ids))
        return token_ids

    def encode(self, text: str, *, add_special_tokens: bool, memo_domain: str | None = None) -> list[int]:
        """add_special_tokens: as the tokenizer does, but never a second BOS before a text that begins with one."""
        self._check_length(text)
        tokenizer = self._need_tokenizer("text")
        token_ids: list[int]
        if self._memo is None or memo_domain is None:
            token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            token_ids = self._memo.encode(text, add_special_tokens=add_special_tokens, domain=memo_domain)
        bos = self._bos_token_id
        if add_special_tokens and bos is not None and self._bos_token and text.startswith(self._bos_token):
            return token_ids[1:] if token_ids[:2] == [bos, bos] else token_ids
        return token_ids

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None,
    ) -> str:
        reads_images = self.engine.image_token is not None
        return render_chat(
            self.tokenizer,
            as_parts(messages) if reads_images else messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_options=template_options,
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        checked = check_token_ids(token_ids, self.engine.vocab_size) if token_ids else []
        text: str = self._need_tokenizer("detokenising").decode(checked, skip_special_tokens=skip_special_tokens)
        return text

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise InvalidParameterError(f"{what} needs a tokenizer and this model has none: give token ids")
        return self.tokenizer

    def _check_length(self, text: str) -> None:
        self.engine.check_text_fits(text)
        check_text("the prompt", text)
