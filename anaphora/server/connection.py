"""One HTTP exchange as an endpoint needs it: a bounded body, the moment the client goes away, an event stream.

Knows ASGI only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from anaphora.server.errors import ApiError

HEARTBEAT = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


class Connection:
    """Reads and writes one exchange. Call `body` once, then `gone`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.has_begun = False
        self._receive = receive
        self._send = send

    async def body(self, max_bytes: int) -> bytes:
        """The whole body. Raises ApiError (413) as soon as it is too large, and ClientGoneError."""
        length = dict(self.scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > max_bytes:
            raise _too_large(max_bytes)
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def gone(self) -> None:
        """Return when the client has closed its side, or the exchange is over."""
        while (await self._receive())["type"] != "http.disconnect":
            continue

    async def send_json(self, status: int, document: Any, headers: Mapping[str, str] | None = None) -> None:
        await self.send_encoded(status, json.dumps(document, ensure_ascii=False, allow_nan=False).encode(), headers)

    async def send_encoded(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """body: JSON."""
        await self._begin(
            status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        await self._begin(200, headers | {"x-accel-buffering": "no"})

    async def send_events(self, events: Iterable[bytes]) -> None:
        data = b"".join(events)
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, last: bytes = DONE) -> None:
        await self._send({"type": "http.response.body", "body": last})

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""They end no line of an event stream, and many clients split lines there all the same. JSON escapes those in ASCII."""


def event(document: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    data = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not data.isascii():
        data = data.translate(_LINE_ENDS)
    return ((f"event: {name}\n" if name else "") + f"data: {data}\n\n").encode()


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {max_bytes} bytes (max_body_bytes)", code="body_too_large", param="body"
    )
