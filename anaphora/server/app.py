"""The URLs of one server. Knows every endpoint and does no work of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from anaphora.engine.async_engine import AsyncEngine
from anaphora.engine.engine import Engine
from anaphora.errors import ConfigError, EngineStoppedError
from anaphora.server.adapters import load_adapter, unload_adapter
from anaphora.server.chat import prepare_chat
from anaphora.server.completions import prepare_completion
from anaphora.server.config import ServerConfig
from anaphora.server.connection import ClientGoneError, Connection
from anaphora.server.errors import ApiError, as_api_error, invalid
from anaphora.server.generation import Arrival, GenerationEndpoint, Job, Places
from anaphora.server.metrics import CONTENT_TYPE, Metrics
from anaphora.server.responses import prepare_response
from anaphora.server.service import Service
from anaphora.server.tenants import ApiKeys, CacheDomains
from anaphora.server.text import TextTools
from anaphora.server.tokens import detokenize, tokenize

_Answer = Callable[[Service, bytes], Awaitable[dict[str, Any]]]


def build_app(
    engine: Engine,
    config: ServerConfig,
    *,
    model_name: str,
    max_num_seqs: int,
    api_keys: ApiKeys | None = None,
    secret: bytes | None = None,
) -> Starlette:
    """An ASGI application over an engine, which from now on belongs to it. Its lifespan starts and stops the engine.

    model_name: what requests may call the model. max_num_seqs: as the engine has it; with max_queue it says when the
    house is full. api_keys: None lets anybody call. secret: of the tenants' salts; None draws one, so that salts differ
    from server to server. Raises ConfigError.
    """
    if api_keys is None and config.share_cache:
        raise ConfigError("share_cache names tenants, and without a key file there are none: give api_key_file")
    if api_keys is not None and (unknown := {t for group in config.share_cache for t in group} - api_keys.tenants):
        raise ConfigError(f"share_cache names tenants that have no key: {', '.join(sorted(unknown))}")
    async_engine = AsyncEngine(engine, num_workers=config.num_text_workers)
    service = Service(
        engine=async_engine,
        text=TextTools(engine),
        config=config,
        metrics=Metrics(async_engine),
        domains=CacheDomains(secret or secrets.token_bytes(32), config.share_cache),
        api_keys=api_keys,
        model_name=config.served_model_name or model_name,
    )
    places = Places(max_num_seqs + config.max_queue)

    def generating(name: str, prepare: Callable[[Service, bytes, Arrival], Awaitable[Job]]) -> GenerationEndpoint:
        async def bound(body: bytes, arrival: Arrival) -> Job:
            job = await prepare(service, body, arrival)
            service.metrics.tokenized(engine.clock() - arrival.arrival_s)
            return job

        return GenerationEndpoint(name, bound, service.authenticate, async_engine, config, service.metrics, places)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async_engine.start()
        try:
            yield
        finally:
            await async_engine.stop()

    site = _Site(service)
    return Starlette(
        routes=[
            Route("/v1/models", site.models),
            Route("/v1/completions", generating("completions", prepare_completion), methods=["POST"]),
            Route("/v1/chat/completions", generating("chat", prepare_chat), methods=["POST"]),
            Route("/v1/responses", generating("responses", prepare_response), methods=["POST"]),
            Route("/tokenize", _JsonEndpoint(service, places, tokenize), methods=["POST"]),
            Route("/detokenize", _JsonEndpoint(service, places, detokenize), methods=["POST"]),
            Route("/v1/load_lora_adapter", _JsonEndpoint(service, places, load_adapter, admin=True), methods=["POST"]),
            Route(
                "/v1/unload_lora_adapter", _JsonEndpoint(service, places, unload_adapter, admin=True), methods=["POST"]
            ),
            Route("/reset_prefix_cache", site.reset_prefix_cache, methods=["POST"]),
            Route("/health", site.health),
            Route("/ready", site.health),
            Route("/version", site.version),
            Route("/metrics", site.metrics),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _internal_error},
    )


class _Site:
    """The small endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """Starting, draining and crashed are one answer here: send no work."""
        if not self._service.engine.is_running:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._service.authenticate(request.scope)
        engine, base = self._service.engine.engine, self._service.model_name
        common = {"object": "model", "created": 0, "owned_by": "anaphora", "max_model_len": engine.max_model_len}
        models = [{"id": base, **common}]
        models += [{"id": adapter.name, **common, "parent": base} for adapter in engine.adapters]
        return JSONResponse({"object": "list", "data": models})

    async def version(self, request: Request) -> Response:
        """root: the digest of what the model is, as `identity` says it; equal roots compute equal K/V."""
        self._service.authenticate(request.scope)
        engine = self._service.engine.engine
        identity = dict(engine.identity)
        return JSONResponse({"version": version("anaphora"), "root": engine.root.hex(), "identity": identity})

    async def metrics(self, request: Request) -> Response:
        if not self._service.config.open_metrics:
            self._service.authenticate_admin(request.scope)
        return Response(self._service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """200 if everything cached is forgotten, 409 if nothing was done as requests hold blocks."""
        self._service.authenticate_admin(request.scope)
        preempt = _preempt_running(await request.body())
        try:
            done = await self._service.engine.reset_prefix_cache(preempt_running=preempt)
        except EngineStoppedError as error:
            raise as_api_error(error, prompt="") from None
        if done:
            return JSONResponse({"reset": True})
        message = "requests hold blocks: nothing was reset. Wait until they end, or send preempt_running: true"
        return JSONResponse({"reset": False, **ApiError(409, message, code="cache_in_use").body}, 409)


class _JsonEndpoint:
    """An ASGI application: JSON in, JSON out, at once. admin: only for admins."""

    def __init__(self, service: Service, places: Places, answer: _Answer, *, admin: bool = False) -> None:
        self._service = service
        self._places = places
        self._answer = answer
        self._authenticate = service.authenticate_admin if admin else service.authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, config = Connection(scope, receive, send), self._service.config
        self._authenticate(scope)
        self._places.take()
        try:
            async with asyncio.timeout(config.request_timeout_s):
                body = await connection.body(config.max_body_bytes)
                await connection.send_json(200, await self._answer(self._service, body))
        except TimeoutError:
            message = f"the request took longer than {config.request_timeout_s:g} s"
            raise ApiError(504, message, code="request_timeout") from None
        except ClientGoneError:
            return
        finally:
            self._places.give_back(1)


def _preempt_running(body: bytes) -> bool:
    if not body.strip():
        return False
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise invalid(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_json")
    wanted = fields.pop("preempt_running", False)
    if fields:
        raise invalid(min(fields), f"unknown field {min(fields)!r}", "unknown_parameter")
    if not isinstance(wanted, bool):
        raise invalid("preempt_running", "preempt_running must be true or false")
    return wanted


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    return ApiError(500, "internal error", code="internal_error").response()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()
