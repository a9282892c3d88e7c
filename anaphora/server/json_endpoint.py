"""The life of a request that is answered at once: JSON in, JSON out. Knows connections, places and deadlines; must not
know what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from anaphora.errors import EngineStoppedError
from anaphora.server.connection import ClientGoneError, Connection
from anaphora.server.errors import ApiError, as_api_error
from anaphora.server.generation import Places
from anaphora.server.service import Service
from anaphora.server.tenants import Caller

Answer = Callable[[Service, bytes], Awaitable[dict[str, Any]]]
"""A body to a reply. Raises ApiError, EngineStoppedError."""


@dataclass(frozen=True, slots=True)
class ToCaller:
    """An answer that depends on who asks."""

    answer: Callable[[Service, Caller, bytes], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class JsonEndpoint:
    """An ASGI application. places: None answers even if the house is full. Raises ApiError before the reply begins."""

    service: Service
    answer: Answer | ToCaller
    places: Places | None = None
    needs_admin: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, config = Connection(scope, receive, send), self.service.config
        service = self.service
        caller = service.authenticate_admin(scope) if self.needs_admin else service.authenticate(scope)
        if self.places is not None:
            self.places.take()
        try:
            async with asyncio.timeout(config.request_timeout_s):
                body = await connection.body(config.max_body_bytes)
                if isinstance(self.answer, ToCaller):
                    reply = self.answer.answer(service, caller, body)
                else:
                    reply = self.answer(service, body)
                await connection.send_json(200, await reply)
        except TimeoutError:
            if connection.has_begun:  # a client that does not read: there is nothing left to tell
                return
            message = f"the request took longer than {config.request_timeout_s:g} s"
            raise ApiError(504, message, code="request_timeout") from None
        except EngineStoppedError as error:
            raise as_api_error(error, prompt="") from None
        except ClientGoneError:
            return
        finally:
            if self.places is not None:
                self.places.give_back(1)
