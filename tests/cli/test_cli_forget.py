"""`anaphora forget` against a real socket: what is sent, what is said, and how refusals end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from anaphora.cli.main import main


class Recorder(HTTPServer):
    reply: tuple[int, Any] = (200, {"forgotten": "cache_salt"})
    seen: list[tuple[str, str | None, Any]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Recorder = self.server  # type: ignore[assignment]
        body = self.rfile.read(int(self.headers["content-length"]))
        server.seen.append((self.path, self.headers["authorization"], json.loads(body)))
        status, reply = server.reply
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Recorder]:
    server = Recorder(("127.0.0.1", 0), Handler)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(server: Recorder, *arguments: str) -> int:
    return main(["forget", f"http://127.0.0.1:{server.server_port}/", *arguments])


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        (["--salt", "x"], {"cache_salt": "x"}),
        (["--cache-salt", "x"], {"cache_salt": "x"}),
        (["--tenant", "anna"], {"tenant": "anna"}),
        (["--adapter", "sql"], {"adapter": "sql"}),
        (["--prompt", "once", "--salt", "x", "--model", "sql"], {"prompt": "once", "cache_salt": "x", "model": "sql"}),
        (["--prompt-ids", "1, 2,3", "--tenant", "anna"], {"prompt": [1, 2, 3], "tenant": "anna"}),
    ],
)
def test_the_options_are_the_fields(server: Recorder, arguments: list[str], body: dict[str, Any]) -> None:
    assert run(server, "--api-key", "key-1", *arguments) == 0
    assert server.seen == [("/forget_prefix_cache", "Bearer key-1", body)]


def test_the_base_url_of_clients_will_do(server: Recorder) -> None:
    assert main(["forget", f"http://127.0.0.1:{server.server_port}/v1", "--salt", "x"]) == 0
    assert server.seen == [("/forget_prefix_cache", None, {"cache_salt": "x"})]


def test_it_says_what_was_forgotten(server: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--salt", "x") == 0
    assert capsys.readouterr().out == "forgotten: cache_salt\n"
    server.reply = 200, {"forgotten": "prompt", "num_tokens": 32}
    assert run(server, "--prompt-ids", "1") == 0
    assert capsys.readouterr().out == "forgotten: prompt: all that begins with its first 32 tokens\n"
    assert run(server, "--prompt-ids", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"forgotten": "prompt", "num_tokens": 32}


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        ((403, {"error": {"message": "this needs an admin key"}}), 2, "refuses (403): this needs an admin key"),
        ((404, b"<html>"), 1, "is no Anaphora server"),
        ((200, {"ok": True}), 1, "is no Anaphora server"),
        ((200, []), 1, "is no Anaphora server"),
    ],
)
def test_refusals_and_strangers(
    server: Recorder, capsys: pytest.CaptureFixture[str], reply: Any, code: int, message: str
) -> None:
    server.reply = reply
    assert run(server, "--salt", "x") == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ftp://host", "--salt", "x"], 2),
        (["http://[::1", "--salt", "x"], 2),
        (["http://127.0.0.1:1", "--salt", "x"], 1),
        (["http://127.0.0.1:1", "--prompt", "a", "--prompt-ids", "1"], 2),
        (["http://127.0.0.1:1", "--prompt-ids", "1,a"], 2),
        (["http://127.0.0.1:1", "--salt", "x", "--api-key", "ä"], 2),
    ],
)
def test_what_cannot_be_sent(arguments: list[str], code: int) -> None:
    assert main(["forget", *arguments]) == code
