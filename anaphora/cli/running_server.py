"""A running server as the commands reach it: one address, one key, plain replies. Knows HTTP and no endpoint."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from anaphora.errors import ConfigError, ServerUnreachableError

_MAX_REPLY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RunningServer:
    """url: with or without the /v1 of clients' base URLs. Raises ConfigError for what is no URL or key of a server."""

    url: str
    api_key: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_server = False
        if not is_server:
            raise ConfigError(f"the server must be given as http://HOST:PORT, got {self.url!r}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("the API key holds characters that no header can carry: check it")

    def get(self, path: str) -> tuple[int, str]:
        """Status and text. Raises ServerUnreachableError."""
        return self._ask(path, None)

    def post(self, path: str, fields: dict[str, Any]) -> tuple[int, str]:
        """The same, of an answer to a JSON object."""
        return self._ask(path, json.dumps(fields).encode())

    def _ask(self, path: str, body: bytes | None) -> tuple[int, str]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        base = self.url.rstrip("/").removesuffix("/v1")
        request = urllib.request.Request(base + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                return reply.status, reply.read(_MAX_REPLY_BYTES).decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(_MAX_REPLY_BYTES).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerUnreachableError(
                f"{self.url} does not answer ({reason}): is the server running, and is this its address?"
            ) from error
