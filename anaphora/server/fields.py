"""The bodies of the generating endpoints as pydantic models, and how a body becomes one. No defaults of values here:
null and absent are the same everywhere, and `None`.

An unknown field is refused, never ignored; but after the model was made, as pydantic would collect one error for each
of a million. Lists and maps are `Any` here and checked where they are used, up to the
first fault, for the same reason. Must not know the engine.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from anaphora.server.errors import ApiError, invalid

_CONFIG = ConfigDict(
    extra="allow",
    strict=True,
    frozen=True,
    protected_namespaces=(),
    json_schema_extra={"additionalProperties": False},
)


class RequestFields(BaseModel):
    model_config = _CONFIG

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = _CONFIG

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(RequestFields):
    """What every generating endpoint takes."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Any = None
    priority: int | None = None
    cache_priority: int | None = None
    pin_ttl_s: float | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None

    # Accepted and without effect: none of them may change the output.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChoiceFields(GenerationFields):
    """What completions and chat completions share."""

    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    return_tokens_as_token_ids: bool | None = None


class CompletionFields(ChoiceFields):
    prompt: Any = None
    prompt_embeds: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ConversationFields(RequestFields):
    """What the chat template reads."""

    messages: Any = None
    tools: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatFields(ChoiceFields, ConversationFields):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None


class ResponsesFields(GenerationFields):
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: Any = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None


class EmbeddingFields(RequestFields):
    input: Any = None
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Any = None
    priority: int | None = None
    user: str | None = None  # accepted and without effect


class TokenizeFields(ConversationFields):
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(RequestFields):
    tokens: Any = None
    skip_special_tokens: bool | None = None


class LoadAdapterFields(BaseModel):
    model_config = _CONFIG

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterFields(BaseModel):
    model_config = _CONFIG

    lora_name: str
    lora_int_id: int | None = None  # without effect: adapters have no numbers here


# Python cannot do anything else while a body becomes objects. So a body has at most so many of these signs, those in
# strings among them: each limit is a few tenths of a second, and no prompt that fits has as many.
MAX_CONTAINERS = 200_000  # [ and {
MAX_MEMBERS = 200_000  # :
MAX_VALUES = 2_000_000  # ,

_Fields = TypeVar("_Fields", bound=BaseModel)


def parse_fields(kind: type[_Fields], body: bytes) -> _Fields:
    """A JSON body as its model. Raises ApiError that names the field."""
    for what, count, most in (
        ("lists and objects", body.count(b"[") + body.count(b"{"), MAX_CONTAINERS),
        ("members of objects", body.count(b":"), MAX_MEMBERS),
        ("values", body.count(b","), MAX_VALUES),
    ):
        if count > most:
            raise invalid("body", f"the body holds more than {most} {what}", "invalid_value")
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_api_error(error) from None
    _refuse_unknown(fields)
    return fields


def _refuse_unknown(fields: BaseModel, inside: str | None = None) -> None:
    for name in fields.model_extra or ():
        param = name if inside is None else f"{inside}.{name}"
        raise invalid(param, f"unknown field {param!r}: this server does not ignore fields", "unknown_parameter")
    for name in fields.model_fields_set:
        if isinstance(value := getattr(fields, name), BaseModel):
            _refuse_unknown(value, name)


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return invalid(None, f"the body is not valid JSON: {first['msg']}", "invalid_json")
    path = [str(part) for part in first["loc"]]
    if not path:
        return invalid(None, f"the body must be a JSON object: {first['msg']}", "invalid_json")
    param = ".".join(path) if path[0] == "stream_options" else path[0]
    return invalid(param, f"{param}: {first['msg']}", "invalid_type")
