"""What callers may hand to `LLM`, sorted out: one prompt or several, one value or one for each.

Knows shapes of arguments; must not know engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from anaphora.engine.chat_template import Message
from anaphora.errors import InvalidParameterError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with images or rows of embeddings (docs/multimodal.md)."""


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, integers, or a dict) as a list of one; several as they are. No prompts is a list too."""
    if isinstance(prompts, str | Mapping) or getattr(prompts, "ndim", 0) == 1:
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidParameterError(
            f"prompts must be a string, a list of token ids, or a list of those, got {type(prompts).__name__}"
        )
    one = len(prompts) > 0 and isinstance(prompts[0], Integral | float)  # a float is refused as a token id, later
    return [prompts] if one else list(prompts)  # type: ignore[list-item, arg-type]


def conversation_list(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation as a list of one; several as they are."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameterError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, or a list of such lists, "
            f"got {type(messages).__name__}"
        )
    one = not messages or isinstance(messages[0], Mapping)
    return [messages] if one else list(messages)  # type: ignore[list-item, arg-type]


def is_conversation(prompt: object) -> bool:
    """Whether this is a list of messages rather than text or token ids."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def per_request(name: str, value: Any, count: int) -> list[Any]:
    """One value for all requests, or a list of one for each. Raises InvalidParameterError if the counts differ."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise InvalidParameterError(
                f"{name} has {len(value)} entries for {count} prompts; give one, or one for each"
            )
        return list(value)
    return [value] * count
