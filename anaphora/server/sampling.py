"""From a request's fields to SamplingParams, with the server's limits. Every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from anaphora.errors import InvalidParameterError
from anaphora.salt_regions import CacheSalt, SaltRegions
from anaphora.sampling_params import MAX_STOP_STRINGS, SamplingParams
from anaphora.server.config import ServerConfig
from anaphora.server.errors import as_api_error, invalid, unsupported
from anaphora.server.fields import GenerationFields

ENGINE_NAMES: Mapping[str, str] = MappingProxyType({"json_schema": "response_format", "regex": "response_format"})
"""What requests call fields of SamplingParams, where it is not the same."""

_MAX_REGIONS = 32  # fewer than SaltRegions may have: a tenant's domain may stand before them

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "cache_priority",
    "pin_ttl_s",
)


def sampling_params(
    fields: GenerationFields,
    config: ServerConfig,
    *,
    max_tokens: int,
    n: int = 1,
    response_format: Any = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    names: Mapping[str, str] = ENGINE_NAMES,
) -> SamplingParams:
    """response_format: OpenAI's, and {"type": "regex", "regex": "..."}. names: what this endpoint calls a field of
    SamplingParams, if not the same. Raises ApiError.
    """
    values: dict[str, Any] = {name: getattr(fields, name) for name in _SAME_NAME if getattr(fields, name) is not None}
    _check_stops(values.get("stop"), config)
    _check_stop_token_ids(values.get("stop_token_ids"), config)
    if fields.logit_bias is not None:
        values["logit_bias"] = _logit_bias(fields.logit_bias, config)
    values |= _structure(response_format)
    try:
        return SamplingParams(n=n, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **values)
    except InvalidParameterError as error:
        raise as_api_error(error, prompt="prompt", names=names) from None


def check_n(n: int | None, config: ServerConfig) -> int:
    """How many choices. Raises ApiError."""
    if n is None:
        return 1
    if not 1 <= n <= config.max_n:
        raise invalid("n", f"n must be from 1 to {config.max_n}, got {n}")
    return n


def parse_salt(value: object) -> CacheSalt | None:
    """`cache_salt` of a body: one salt, or a list of {"start": token, "salt": text}. Raises ApiError.

    An empty salt is more likely a mistake than a wish to share.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _checked_salt(value)
    if not isinstance(value, list):
        message = 'cache_salt must be a string, or a list of {"start": token, "salt": string}'
        raise invalid("cache_salt", message, "invalid_type")
    if len(value) > _MAX_REGIONS:
        raise invalid("cache_salt", f"cache_salt has {len(value)} regions, at most {_MAX_REGIONS} are allowed")
    if not value:
        raise invalid("cache_salt", "cache_salt has no regions: leave it out to share with requests without one")
    regions = []
    for region in value:
        if not isinstance(region, dict) or region.keys() != {"start", "salt"}:
            message = 'each region of cache_salt must be {"start": token, "salt": string}'
            raise invalid("cache_salt", message, "invalid_type")
        if not isinstance(region["salt"], str):
            raise invalid("cache_salt", "the salt of a region of cache_salt must be a string", "invalid_type")
        regions.append((region["start"], _checked_salt(region["salt"])))
    try:
        return SaltRegions(regions)
    except InvalidParameterError as error:
        raise invalid("cache_salt", str(error)) from None


def _checked_salt(salt: str) -> str:
    if not salt:
        raise invalid("cache_salt", "cache_salt must not be empty: leave it out to share with requests without one")
    if len(salt) > 1024:
        raise invalid("cache_salt", f"cache_salt has {len(salt)} characters, at most 1024 are allowed")
    return salt


def _structure(response_format: Any) -> dict[str, Any]:
    """What shapes the output, as fields of SamplingParams."""
    if response_format is None:
        return {}
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    match kind:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": {"type": "object"}}
        case "json_schema":
            wanted = response_format.get("json_schema")
            if isinstance(wanted, dict) and isinstance(wanted.get("schema"), dict):
                return {"json_schema": wanted["schema"]}
            raise invalid("response_format", 'response_format needs "json_schema": {"name": "...", "schema": {...}}')
        case "regex":
            if isinstance(response_format.get("regex"), str):
                return {"regex": response_format["regex"]}
            raise invalid("response_format", 'response_format needs "regex": "..."')
    raise unsupported("response_format", "response_format must be of the type text, json_object, json_schema or regex")


def _check_stops(stop: Any, config: ServerConfig) -> None:
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid("stop", "stop must be a string or a list of strings", "invalid_type")
    if len(texts) > MAX_STOP_STRINGS:
        raise invalid("stop", f"stop holds {len(texts)} strings, at most {MAX_STOP_STRINGS} are allowed")
    for text in texts:
        if len(text) > config.max_stop_chars:
            raise invalid(
                "stop", f"stop holds a string of {len(text)} characters, at most {config.max_stop_chars} are allowed"
            )


def _check_stop_token_ids(token_ids: Any, config: ServerConfig) -> None:
    """Their number; SamplingParams checks each."""
    if isinstance(token_ids, list) and len(token_ids) > config.max_stop_token_ids:
        message = f"stop_token_ids has {len(token_ids)} entries, at most {config.max_stop_token_ids} are allowed"
        raise invalid("stop_token_ids", message)


def _logit_bias(bias: Any, config: ServerConfig) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise invalid("logit_bias", "logit_bias must map token ids to numbers", "invalid_type")
    if len(bias) > config.max_logit_bias:
        raise invalid("logit_bias", f"logit_bias has {len(bias)} entries, at most {config.max_logit_bias} are allowed")
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f"logit_bias must map token ids to numbers, got the key {key[:40]!r}")
    by_id = {int(key): value for key, value in bias.items()}
    if len(by_id) < len(bias):
        raise invalid("logit_bias", "logit_bias names a token twice (leading zeros make no other token)")
    return by_id
