"""Token ids of one request to text, as they arrive. Knows a tokenizer's `decode`; must not know requests or steps.

A token is not a piece of text: one character may span tokens, and many tokenizers strip the space of the first
token that they decode. So new tokens are decoded behind a few tokens whose text is known, and text that may still
change is held back:

    context            window
    [ text known      )[ certain, given out | held: ends inside a character )
    [ base                                 )
    [ text                                                                  )

Everything given out adds up to the text that the tokens add to the prompt. With byte-level tokenizers that is one
`decode` of them all, whatever the bytes. Tokenizers with byte fallback decode a run of byte tokens as a whole, so an
invalid byte there can spoil characters before it that were given out already; those stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.engine.protocols import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what `decode` gives for bytes that are no character, or none yet
_PROMPT_ENDS = (1, 2, 4, 8, 16)  # tokens of the prompt's end tried as the first context, shortest first
_WINDOW = 8  # tokens until the window moves on; more than one, as each move costs a decode
_MAX_WINDOW = 32  # as much as bytes that never become a character may hold back
_LONGEST_CHARACTER = 4  # bytes, so tokens at most


class Detokenizer:
    """The text of one request, token by token. The work for a token does not grow with the output."""

    __slots__ = ("_base", "_context", "_skip_special_tokens", "_text", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context, self._base = self._end_of(prompt_token_ids)
        self._window: list[int] = []
        self._text = self._base

    def add(self, token_id: int) -> str:
        """The text that is certain with this token and was not before; may be empty."""
        before = self._text
        self._window.append(token_id)
        self._text = self._decode(self._context + self._window)
        if self._text.endswith(REPLACEMENT):  # perhaps the first bytes of a character
            new = self._give(self._text.rstrip(REPLACEMENT))
            return new if len(self._window) < _MAX_WINDOW else new + self._cut()
        if self._text == before != "":  # a token without text (special, skipped) would push the context out
            self._window.pop()
            return ""
        new = self._give(self._text)
        if len(self._window) >= _WINDOW:
            self._context, self._window = self._window, []
            self._text = self._base = self._decode(self._context)
        return new

    def flush(self) -> str:
        """The text still held back, at the end of the output: bytes that never became a character, as U+FFFD."""
        return self._give(self._text)

    def _give(self, certain: str) -> str:
        """Give out what `certain` has beyond the base."""
        new = certain[len(self._base) :]
        if new:
            self._base = certain
        return new

    def _cut(self) -> str:
        """Move a full window on that ends inside a character. UTF-8 synchronises itself: decoding may start anywhere.

        Only the last U+FFFD can still become a character: a decoder gives one for all the bytes of an unfinished one.
        """
        context = self._window[-_LONGEST_CHARACTER:]
        text = self._decode(context)
        held = 1 if text.endswith(REPLACEMENT) else 0
        new = self._give(self._text[: len(self._text) - held])
        self._context, self._window = context, []
        self._text, self._base = text, text[: len(text) - held]
        return new

    def _end_of(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The shortest end of the prompt that is whole characters, and its text; nothing if there is none."""
        for length in _PROMPT_ENDS:
            context = list(prompt_token_ids[-length:])
            text = self._decode(context) if context else ""
            if text and REPLACEMENT not in text:
                return context, text
            if length >= len(prompt_token_ids):
                break
        return [], ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
