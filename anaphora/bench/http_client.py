"""One keep-alive connection to an OpenAI-compatible server: JSON in, JSON or server-sent events out.

Knows HTTP and when each event came; must not know an engine or what the events mean. The standard library's client:
nothing between the socket and the clock.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from anaphora.errors import BenchError, ConfigError


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is. `http://host:8000` and `http://host:8000/v1` are the same. Raises ConfigError."""

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # a port that is no number
            usable = False
        if not usable or parts.query or parts.fragment:
            raise ConfigError(f"a target's URL must look like http://host:8000 or https://host/v1, got {self.url!r}")
        if parts.username or parts.password:
            raise ConfigError("a target's URL must hold no password: give --api-key, or set ANAPHORA_BENCH_API_KEY")
        if self.timeout_s <= 0:
            raise ConfigError(f"the timeout must be above 0 seconds, got {self.timeout_s}")

    @property
    def api_path(self) -> str:
        """Of OpenAI's endpoints: `/v1` unless the URL names a path of its own (`/v3`, `/openai/v1`)."""
        return urlsplit(self.url).path.rstrip("/") or "/v1"

    @property
    def root_path(self) -> str:
        """Of everything else, such as /metrics."""
        return self.api_path.rpartition("/")[0]

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self.timeout_s, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=self.timeout_s)

    @property
    def headers(self) -> dict[str, str]:
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", "Accept": "*/*", **key}


class RefusedError(Exception):
    """An answer that is not 200: the request's fault, or the server's limit. `status` says which."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Connection:
    """One request at a time; reconnects where the server has closed in between. Not for two threads."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = server.connect()

    def open(self) -> None:
        """Connect now, so that connecting is no part of what is timed next. Raises BenchError."""
        if self._http.sock is None:
            try:
                self._http.connect()
            except OSError as error:
                raise self._gone(error) from error

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        """The body of a 200. Raises RefusedError, BenchError."""
        response = self._send(method, path, body)
        try:
            return response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """(time.perf_counter(), document) of each server-sent event until `[DONE]`. Raises RefusedError, BenchError."""
        response = self._send("POST", path, body)
        try:
            for line in response:
                now_s = time.perf_counter()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    break
                yield now_s, _document(data)
            response.read()  # to the end: the connection is used again
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise self._gone(error) from error

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body).encode()
        try:
            try:
                self._http.request(method, path, payload, self._server.headers)
                response = self._http.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self._http.close()  # an idle connection that the server gave up: once more on a new one
                self._http.request(method, path, payload, self._server.headers)
                response = self._http.getresponse()
            if response.status != 200:
                text = response.read().decode(errors="replace")
                raise RefusedError(response.status, _message(text))
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise self._gone(error) from error
        return response

    def _gone(self, error: Exception) -> BenchError:
        return BenchError(
            f"{self._server.url} cannot be reached ({type(error).__name__}: {error}): start it, then run the same "
            "command again; it goes on where it stopped"
        )


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise BenchError(f"the server sent an event that is no JSON object: {data[:80]!r}")
    return document


def _message(text: str) -> str:
    """The server's own words, shortened."""
    try:
        document = json.loads(text)
        error = document.get("error", document) if isinstance(document, dict) else document
        words = error.get("message") or error.get("detail") or text if isinstance(error, dict) else error
    except ValueError:
        words = text
    return " ".join(str(words).split())[:300]
