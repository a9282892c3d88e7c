"""Chat messages as clients send them, made into what chat templates read. Knows OpenAI's shapes only.

Two things are normalised, so that the same conversation is the same tokens: a content of text parts becomes one string
(the parts joined by newlines), and the arguments of a tool call, JSON text, become the object that it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from anaphora.server.errors import ApiError, invalid, unsupported

_TEXT_PARTS = ("text", "input_text", "output_text")


def template_messages(
    messages: Sequence[dict[str, Any]], field: str = "messages", *, with_images: bool = False
) -> list[dict[str, Any]]:
    """field: what the endpoint calls the list. with_images: leave contents with images in them as lists of parts.

    Raises ApiError with the path of what is wrong.
    """
    if not messages:
        raise invalid(field, f"{field} must not be empty")
    return [_message(message, f"{field}[{index}]", with_images) for index, message in enumerate(messages)]


def _message(message: dict[str, Any], path: str, with_images: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{path}.role", "a message needs a role: system, developer, user, assistant or tool")
    done = {key: value for key, value in message.items() if value is not None or key == "content"}
    content = message.get("content")
    if isinstance(content, list) and with_images and any(map(_is_image, content)):
        done["content"] = [
            part if _is_image(part) else {"type": "text", "text": _part(part, f"{path}.content[{index}]")}
            for index, part in enumerate(content)
        ]
    elif isinstance(content, list):
        done["content"] = "\n".join(_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))
    elif content is None:
        if role in ("system", "user", "tool"):
            raise invalid(f"{path}.content", f"a message of the role {role} needs content: a string or text parts")
        done["content"] = ""
    elif not isinstance(content, str):
        raise invalid(f"{path}.content", "content must be a string or a list of text parts")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise invalid(f"{path}.tool_calls", "tool_calls must be a list")
        done["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return done


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _part(part: object, path: str) -> str:
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise unsupported(path, f"this server reads text parts only, got a part of the type {kind!r}")


def _tool_call(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad_call(path)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = arguments  # the model wrote it, and the template shows it as it is
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is not None and not isinstance(arguments, dict):
        raise _bad_call(path)
    return {**call, "function": {**function, "arguments": arguments}}


def _bad_call(path: str) -> ApiError:
    return invalid(path, 'a tool call must look like {"function": {"name": "...", "arguments": "{...}"}}')
