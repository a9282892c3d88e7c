"""The OpenAPI 3.1 document of a server, made from its table of operations and the pydantic models of their bodies.

Knows shapes only; must not know what an endpoint does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

Access = Literal["open", "key", "admin"]

REFUSES_BODIES = (400, 404, 413)
"""Any endpoint that reads a body may answer so: a field, the model's name, the size."""
GENERATES = (*REFUSES_BODIES, 429, 500, 503, 504)
ANSWERS_AT_ONCE = (*REFUSES_BODIES, 429, 504)

_BY_ACCESS: Mapping[Access, tuple[int, ...]] = {"open": (), "key": (401,), "admin": (401, 403)}

_MEANINGS = {
    200: "Done.",
    400: "The body or a field of it is wrong, unknown or not supported; `param` names it.",
    401: "No valid key.",
    403: "The key is no admin's.",
    404: "This server has no such model.",
    409: "Requests hold blocks: nothing was done.",
    413: "The body is too large.",
    429: "The house is full; `Retry-After` says when to try again.",
    500: "The model failed on this request, or a bug.",
    503: "The engine has stopped, or the server shuts down.",
    504: "The request took too long.",
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "additionalProperties": False,
        }
    },
}


_REST_OF_PATH = re.compile(r"{(\w+):path}")

_DATA: Mapping[str, dict[str, Any]] = {
    "application/json": {"type": "object"},
    "text/plain": {"type": "string"},
    "text/event-stream": {
        "description": "One event; its data is JSON text, or [DONE].",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    },
}
"""What a 200 holds, by its media type."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one URL. endpoint: what Starlette routes to. path: as Starlette has it, `{name:path}` for the rest.

    statuses: what it may answer besides 200 and what its access brings. media: of the 200. body_is_optional: an empty
    body is as good as {}.
    """

    method: Literal["GET", "POST"]
    path: str
    endpoint: Any
    summary: str
    access: Access = "key"
    body: type[BaseModel] | None = None
    body_is_optional: bool = False
    statuses: Sequence[int] = ()
    media: Sequence[str] = ("application/json",)


def describe(operations: Iterable[Operation], *, version: str, has_keys: bool) -> dict[str, Any]:
    """The document. has_keys: whether callers must show one."""
    operations = list(operations)
    bodies = {operation.body for operation in operations if operation.body is not None}
    _, definitions = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    schemas = {name: _shaped(name, schema) for name, schema in definitions.get("$defs", {}).items()}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _REST_OF_PATH.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, has_keys)
    components: dict[str, Any] = {"schemas": {**schemas, "Error": _ERROR}}
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Anaphora", "version": version},
        "paths": paths,
        "components": components,
    }


def _described(operation: Operation, has_keys: bool) -> dict[str, Any]:
    statuses = {200, *operation.statuses, *(_BY_ACCESS[operation.access] if has_keys else ())}
    replies = {
        str(status): {
            "description": _MEANINGS[status],
            "content": {kind: {"schema": _reply_schema(status, kind)} for kind in _media(operation, status)},
        }
        for status in sorted(statuses)
    }
    described: dict[str, Any] = {"summary": operation.summary, "responses": replies}
    if has_keys and operation.access != "open":
        described["security"] = [{"key": []}]
    if names := _REST_OF_PATH.findall(operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        required = not operation.body_is_optional
        described["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    return described


def _media(operation: Operation, status: int) -> Sequence[str]:
    return operation.media if status == 200 else ("application/json",)


def _reply_schema(status: int, media: str) -> dict[str, Any]:
    if status != 200:
        return {"$ref": "#/components/schemas/Error"}
    return _DATA[media]


def _shaped(model: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A model's schema with the shapes that its `Any` fields stand for, and what it cannot do without."""
    required = _REQUIRED.get(model, ())
    properties = {}
    for name, field in schema.get("properties", {}).items():
        if "type" not in field and "anyOf" not in field and "$ref" not in field and name in _SHAPES:
            shape = _SHAPES[name]
            field = shape if name in required else {"anyOf": [shape, {"type": "null"}], "default": None}
        properties[name] = field
    return {**schema, "properties": properties, **({"required": list(required)} if required else {})}


_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "ChatFields": ("messages",),
    "CompletionFields": ("prompt",),
    "DetokenizeFields": ("tokens",),
    "EmbeddingFields": ("input",),
    "ResponsesFields": ("input",),
}

_TEXT: dict[str, Any] = {"type": "string"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPTS: dict[str, Any] = {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _IDS]}}]}
_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": _TEXT},
}
_URL: dict[str, Any] = {"type": "object", "required": ["url"], "properties": {"url": _TEXT, "detail": _TEXT}}
_IMAGE_PART: dict[str, Any] = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {"type": {"enum": ["image_url"]}, "image_url": {"anyOf": [_TEXT, _URL]}},
}
_PARTS: dict[str, Any] = {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"type": "string", "minLength": 1}, "content": {"anyOf": [_TEXT, _PARTS]}},
}
_MESSAGES: dict[str, Any] = {"type": "array", "minItems": 1, "items": _MESSAGE}

_SALT: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 1024}
_REGION: dict[str, Any] = {
    "type": "object",
    "required": ["start", "salt"],
    "properties": {"start": {"type": "integer", "minimum": 0}, "salt": _SALT},
    "additionalProperties": False,
}

_SHAPES: Mapping[str, dict[str, Any]] = {
    "cache_salt": {"anyOf": [_SALT, {"type": "array", "minItems": 1, "maxItems": 32, "items": _REGION}]},
    "include": {"type": "array", "maxItems": 0},
    "input": {"anyOf": [_PROMPTS, _MESSAGES]},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "messages": _MESSAGES,
    "prompt": _PROMPTS,
    "prompt_embeds": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _TEXT}]},
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema", "regex"]},
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {"name": _TEXT, "schema": {"type": "object"}},
            },
            "regex": _TEXT,
        },
    },
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "stop_token_ids": _IDS,
    "tokens": _IDS,
    "tool_choice": {"enum": ["auto", "none"]},
    "tools": {"type": "array", "items": {"type": "object"}},
}
"""Fields that the models leave to the code that uses them (see `fields`), by what that code asks for."""
