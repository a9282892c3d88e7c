"""Messages to text by the chat template that came with a model. Knows a tokenizer's template; no engine, no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anaphora.errors import InvalidParameterError

Message = Mapping[str, Any]
"""`role`, `content`, and whatever else the model's chat template reads."""

NO_CHAT_TEMPLATE = (
    "this model has no chat template (a base model, or one without a tokenizer): give it a plain prompt, or "
    "use another model"
)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None,
    add_generation_prompt: bool,
    template_options: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the text that the model was trained on, special tokens included.

    template_options: further variables of the template, such as `enable_thinking`.
    Encode it without adding special tokens: the template has put the BOS there. Raises InvalidParameterError.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InvalidParameterError(NO_CHAT_TEMPLATE)
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidParameterError(f"a conversation must be a non-empty list of messages, got {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameterError(
                f"message {index} must be a dict with 'role' (system, user, assistant) and 'content', got {message!r}"
            )
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            **(template_options or {}),
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # templates are programs that come with the model, and refuse in their own ways
        raise InvalidParameterError(f"the model's chat template refuses these messages: {error}") from error
    return str(text)
