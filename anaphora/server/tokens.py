"""`/tokenize`, which also renders chats, and `/detokenize`: exactly what the generating endpoints do with text."""

from __future__ import annotations

from typing import Any

from anaphora.server.errors import invalid
from anaphora.server.fields import DetokenizeFields, TokenizeFields
from anaphora.server.service import Service


async def tokenize(service: Service, body: bytes) -> dict[str, Any]:
    """A prompt or a conversation as token ids; `prompt` is the text that they stand for. Raises ApiError."""
    fields = await service.parse(TokenizeFields, body)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if fields.prompt is not None:
        for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
            if getattr(fields, name) is not None:
                raise invalid(name, f"{name} needs messages: a prompt goes through no chat template")
    elif fields.add_special_tokens is not None:
        raise invalid("add_special_tokens", "the chat template decides about special tokens: leave it out")
    service.check_conversation(fields)

    def work() -> tuple[str, list[int]]:
        if fields.prompt is None:
            text, prompt = service.chat_prompt(fields)
            return text, list(prompt)
        special = fields.add_special_tokens is not False
        return fields.prompt, service.text.encode(fields.prompt, add_special_tokens=special)

    text, token_ids = await service.on_worker("prompt" if fields.messages is None else "messages", work)
    reply: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": service.engine.engine.max_model_len,
        "tokens": token_ids,
        "prompt": text,
    }
    if fields.return_token_strs:

        def strings() -> list[str]:
            return [service.text.decode([token_id]) for token_id in token_ids]

        reply["token_strs"] = await service.on_worker("prompt", strings)
    return reply


async def detokenize(service: Service, body: bytes) -> dict[str, Any]:
    """Token ids as text. Raises ApiError."""
    fields = await service.parse(DetokenizeFields, body)
    token_ids = fields.tokens
    if not isinstance(token_ids, list):
        raise invalid("tokens", "tokens must be a list of token ids", "invalid_type")
    hide = bool(fields.skip_special_tokens)
    text = await service.on_worker("tokens", lambda: service.text.decode(token_ids, skip_special_tokens=hide))
    return {"prompt": text}
