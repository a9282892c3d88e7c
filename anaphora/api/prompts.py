"""What callers may hand to `LLM`, sorted out: one prompt or several, one value or one for each, messages to text.

Knows shapes of arguments and chat templates; must not know engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from anaphora.errors import InvalidParameterError

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
"""`role`, `content`, and whatever else the model's chat template reads."""


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or a sequence of integers) as a list of one; several as they are. No prompts is a list too."""
    if isinstance(prompts, str) or getattr(prompts, "ndim", 0) == 1:
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Sequence):
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


def render_chat(
    tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Any] | None, add_generation_prompt: bool
) -> str:
    """The conversation as the text that the model was trained on, special tokens included.

    Encode it without adding special tokens: the template has put the BOS there. Raises InvalidParameterError.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InvalidParameterError(
            "this model has no chat template (a base model, or one without a tokenizer): use generate, or another model"
        )
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidParameterError(f"a conversation must be a non-empty list of messages, got {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameterError(
                f"message {index} must be a dict with 'role' (system, user, assistant) and 'content', got {message!r}"
            )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # templates are programs that come with the model, and refuse in their own ways
        raise InvalidParameterError(f"the model's chat template refuses these messages: {error}") from error
    return str(text)
