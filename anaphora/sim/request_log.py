"""Request logs in OpenAI's style, one object a line: what was asked, and what was answered if the log has it.

    {"messages": [...] | "prompt": ..., "timestamp" | "created": ..., "response": ..., "usage": {...}}
    {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

Knows these fields; text becomes tokens by a tokenizer that it is given. Nothing of the text goes into the trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from anaphora.core.hashing import pack_tokens, salt_key
from anaphora.engine.chat_template import render_chat
from anaphora.engine.protocols import Tokenizer
from anaphora.errors import InvalidParameterError
from anaphora.sim.mooncake import MAX_LENGTH, MAX_TIMESTAMP_MS, read_integer
from anaphora.sim.numbering import BlockNumbering
from anaphora.sim.trace import TraceRequest

DEFAULT_BLOCK_SIZE = 16
_UNKNOWN_OUTPUT_LENGTH = 1
_MILLISECONDS_FROM = 1e11  # as seconds, this would be the year 5138


class RequestLogFormat:
    """See LineFormat. tokenizer: with a chat template, if the log has messages. block_size: tokens behind one id."""

    def __init__(self, tokenizer: Tokenizer, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._numbering = BlockNumbering(block_size)
        self._first_ms: float | None = None
        self._last_ms = 0.0
        self._has_times: bool | None = None

    def parse(self, entry: dict[str, Any]) -> list[TraceRequest]:
        body = _first_object(entry, "body", "request") or entry
        time_ms = _time_ms(entry, body, _first_object(entry, "response") or {})
        if self._has_times is not None and self._has_times != (time_ms is not None):
            raise ValueError(f"it has {'no' if time_ms is None else 'a'} timestamp, unlike the lines before it")
        since_ms = 0.0 if time_ms is None else time_ms - (time_ms if self._first_ms is None else self._first_ms)
        if since_ms < self._last_ms:
            raise ValueError(f"time goes back by {self._last_ms - since_ms:,.0f} ms")
        try:
            prompts = self._prompts(body)
            salt = body.get("cache_salt")
            extra_keys = () if salt is None else (salt_key(salt),)
        except InvalidParameterError as error:  # of the log, not of an engine's request
            raise ValueError(str(error)) from error
        requests = []
        for prompt in prompts:
            if not 0 < len(prompt) <= MAX_LENGTH:
                raise ValueError(f"a prompt has {len(prompt):,} tokens; it must have 1 to {MAX_LENGTH:,}")
            for output_length, output in self._outputs(entry):
                known = prompt + output[: max(len(output) - 1, 0)]
                ids = self._numbering.ids(known, len(prompt), extra_keys=extra_keys)
                requests.append(TraceRequest(since_ms, len(prompt), output_length, *ids))
        self._has_times = time_ms is not None
        if self._first_ms is None:
            self._first_ms = time_ms
        self._last_ms = since_ms
        return requests

    def _prompts(self, body: Mapping[str, Any]) -> list[array[int]]:
        """The tokens of every prompt of a body. Raises ValueError, InvalidParameterError."""
        if "messages" in body:
            messages, tools = body["messages"], body.get("tools")
            text = render_chat(self._tokenizer, messages, tools=tools, add_generation_prompt=True)
            return [self._encode(text, add_special_tokens=False)]
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return [self._encode(prompt)]
        if isinstance(prompt, list) and prompt and all(isinstance(part, str) for part in prompt):
            return [self._encode(part) for part in prompt]
        if isinstance(prompt, list) and prompt:
            many = prompt if isinstance(prompt[0], list) else [prompt]
            if all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in many):
                try:
                    return [pack_tokens(ids) for ids in many]
                except OverflowError:
                    raise ValueError("a token id of the prompt is not in [0, 2**32)") from None
        raise ValueError("it has no `messages`, and no `prompt` of text or token ids")

    def _outputs(self, entry: Mapping[str, Any]) -> list[tuple[int, array[int]]]:
        """(length, tokens as far as they are known) of every answer; one of unknown length where there is none."""
        response: Any = entry.get("response")
        if isinstance(response, dict) and isinstance(response.get("body"), dict):
            response = response["body"]
        details = response if isinstance(response, dict) else {}
        choices = details.get("choices")
        texts = [_text(choice) for choice in choices] if isinstance(choices, list) else []
        if isinstance(response, str):
            texts = [response]
        usage = details.get("usage") or entry.get("usage")
        length = None
        if len(texts) < 2 and isinstance(usage, dict) and "completion_tokens" in usage:
            length = read_integer(usage, "completion_tokens", 0, MAX_LENGTH)
        return [self._output(text, length) for text in texts or [None]]

    def _output(self, text: str | None, length: int | None) -> tuple[int, array[int]]:
        if text is None:
            return _UNKNOWN_OUTPUT_LENGTH if length is None else length, array("I")
        tokens = self._encode(text, add_special_tokens=False)
        if length is None:
            return len(tokens), tokens
        # An end token may have been counted. Any other difference means that more was generated than the text shows.
        if length - len(tokens) not in (0, 1):
            return length, array("I")
        return length, tokens + array("I", [0] * (length - len(tokens)))

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        return pack_tokens(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _first_object(entry: Mapping[str, Any], *fields: str) -> Mapping[str, Any] | None:
    return next((entry[field] for field in fields if isinstance(entry.get(field), dict)), None)


def _text(choice: Any) -> str | None:
    """What a choice says: of a chat, or of a completion."""
    if not isinstance(choice, dict):
        return None
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else None


def _time_ms(*places: Mapping[str, Any]) -> float | None:
    """Seconds or milliseconds since 1970, or ISO 8601; None if a line has neither field. Raises ValueError."""
    value = next((place[field] for place in places for field in ("timestamp", "created") if field in place), None)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"timestamp must be a number or ISO 8601, got {value[:60]!r}") from None
        value = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIMESTAMP_MS:
        raise ValueError(f"timestamp must be a number of seconds >= 0, got {str(value)[:60]}")
    return float(value) if value >= _MILLISECONDS_FROM else float(value) * 1000
