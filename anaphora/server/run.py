"""Serve an application until SIGTERM or SIGINT: then no new connections, running requests finish or time out, exit.

Knows uvicorn and signals; must not know the engine.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from anaphora.errors import ConfigError
from anaphora.server.config import ServerConfig


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError."""
    if not host:  # to the system, any address of this machine
        raise ConfigError("host is empty: give 127.0.0.1, or 0.0.0.0 to listen at every address")
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be from 0 to 65535, got {port}; 0 takes a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sends small pieces at once (TCP_NODELAY) only where it is. Else the second
    # piece of a reply waits 40 ms for the client's delayed acknowledgement of the first.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:  # the latter: a name that can be no host's
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another host or port") from error
    return listener


class Server(uvicorn.Server):
    """Serves one application; `run([socket])` blocks until it is told to stop and the drain is over.

    config: its drain and keep-alive times hold here. on_ready: called once connections are accepted.
    uvicorn raises a signal anew when it has drained, which would be no exit 0; this server just returns.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, *, on_ready: Callable[[], None] = lambda: None) -> None:
        settings = uvicorn.Config(
            app,
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            ws="none",
            timeout_keep_alive=max(1, round(config.keep_alive_timeout_s)),
            timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
        )
        super().__init__(settings)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # it alone gets signals
            yield
            return
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._end) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True  # told twice
        self.should_exit = True
