"""Refusals and failures in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Knows status codes and Anaphora's errors; must not know endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from anaphora.errors import (
    AdapterChangedError,
    AdapterLimitError,
    AnaphoraError,
    EmptyPromptError,
    EngineStoppedError,
    InvalidTokenError,
    PromptTooLongError,
    RequestError,
    UnknownAdapterError,
)
from anaphora.sampling_params import SamplingParams

_LONGEST_MESSAGE = 1000  # characters: a message may quote what the client sent


class ApiError(Exception):
    """What one HTTP request gets instead of its reply.

    param: the field that is to blame, if one is. extra: what the body says beside the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]} ...")
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers
        self._extra = extra or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {**self._extra, "error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}


_ENGINE_FIELDS = frozenset(SamplingParams.__dataclass_fields__) | {"priority"}


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """The request is wrong: 400."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A field that would change the output and that this server cannot honour: 400, never ignored."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def as_api_error(error: AnaphoraError, *, prompt: str, names: Mapping[str, str] | None = None) -> ApiError:
    """An error of the engine as a reply.

    prompt: what this endpoint calls its prompt. names: fields of SamplingParams that this endpoint calls otherwise;
    their errors begin with the field. Only errors about this very request are quoted: what others did to the engine may
    stand in the rest, which is for the log.
    """
    message = str(error)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, "the engine has stopped: nothing is served any more", code="engine_stopped")
    if isinstance(error, UnknownAdapterError):
        return ApiError(404, message, param="model", code="model_not_found")
    if isinstance(error, AdapterLimitError):
        return ApiError(429, message, param="model", code="adapters_in_use", headers={"retry-after": "1"})
    if isinstance(error, AdapterChangedError):
        return ApiError(503, message, param="model", code="adapter_changed")
    if isinstance(error, PromptTooLongError):
        return invalid(prompt, message, "context_length_exceeded")
    if isinstance(error, EmptyPromptError | InvalidTokenError):
        return invalid(prompt, message)
    if isinstance(error, RequestError):
        field = message.partition(" ")[0]
        if field.startswith("messages["):  # the path of an image
            return invalid(field, message)
        return invalid((names or {}).get(field, field) if field in _ENGINE_FIELDS else prompt, message)
    return ApiError(500, "internal error", code="internal_error")
