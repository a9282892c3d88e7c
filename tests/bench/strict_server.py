"""A server of the oldest kind: text prompts only, no usage, no metrics, nothing beyond the API's first fields."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIELDS = {"model", "prompt", "max_tokens", "temperature", "stream"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(*((200, {"data": [{"id": "old"}]}) if self.path == "/v1/models" else (404, {"detail": "no"})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path != "/v1/completions":
            return self._answer(404, {"detail": "no"})
        if self.headers["Authorization"] != "Bearer secret":
            return self._answer(401, {"error": {"message": "no key"}})
        if not isinstance(body["prompt"], str) or set(body) - FIELDS:
            return self._answer(422, {"detail": "what is that?"})
        if len(body["prompt"].split()) > 200:
            return self._answer(400, {"error": {"message": "too long"}})
        self.server.prompts.append(body["prompt"])  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index in range(body["max_tokens"]):
            reason = "length" if index == body["max_tokens"] - 1 else None
            self._chunk({"choices": [{"text": " so", "finish_reason": reason}]})
        self._raw(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: dict[str, Any]) -> None:
        self._raw(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _raw(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def strict_server() -> Iterator[tuple[str, list[str]]]:
    """Its URL, and the prompts that it answered."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.prompts = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.prompts  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
