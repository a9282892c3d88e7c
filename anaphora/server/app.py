"""The URLs of one server. Knows every endpoint and does no work of theirs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from anaphora.engine.async_engine import AsyncEngine
from anaphora.engine.engine import Engine
from anaphora.server.adapters import load_adapter, unload_adapter
from anaphora.server.admin import ResetFields, reset_prefix_cache
from anaphora.server.arrival import Arrival
from anaphora.server.chat import prepare_chat
from anaphora.server.completions import prepare_completion
from anaphora.server.config import ServerConfig
from anaphora.server.debug import busiest_prefixes
from anaphora.server.embeddings import prepare_embeddings
from anaphora.server.errors import ApiError
from anaphora.server.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    EmbeddingFields,
    LoadAdapterFields,
    ResponsesFields,
    TokenizeFields,
    UnloadAdapterFields,
)
from anaphora.server.forget import ForgetFields, forget_prefix_cache
from anaphora.server.generation import GenerationEndpoint, Job, Places
from anaphora.server.image_fetches import ImageFetches
from anaphora.server.json_endpoint import Answer, JsonEndpoint, ToCaller
from anaphora.server.metrics import CONTENT_TYPE, Metrics
from anaphora.server.openapi import ANSWERS_AT_ONCE, GENERATES, REFUSES_BODIES, Operation, describe
from anaphora.server.responses import prepare_response
from anaphora.server.service import Service
from anaphora.server.tenants import ApiKeys, CacheDomains, check_sharing
from anaphora.server.text import TextTools
from anaphora.server.tokens import detokenize, tokenize

_STREAMS = ("application/json", "text/event-stream")


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
    check_sharing(config.share_cache, api_keys)
    async_engine = AsyncEngine(engine, num_workers=config.num_text_workers)
    service = Service(
        engine=async_engine,
        text=TextTools(engine, memo_bytes=config.token_memo_bytes),
        config=config,
        metrics=Metrics(async_engine),
        domains=CacheDomains(secrets.token_bytes(32) if secret is None else secret, config.share_cache),
        api_keys=api_keys,
        model_name=config.served_model_name or model_name,
        image_fetches=ImageFetches(config),
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async_engine.start()
        try:
            yield
        finally:
            service.image_fetches.stop()
            await async_engine.stop()

    operations = _operations(service, Places(max_num_seqs + config.max_queue))
    app = Starlette(
        routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in operations],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _internal_error},
    )
    app.router.redirect_slashes = False  # a URL that is nearly right is wrong, and says so in JSON
    app.state.description = describe(operations, version=version("anaphora"), has_keys=api_keys is not None)
    return app


def _operations(service: Service, places: Places) -> list[Operation]:
    """Everything that this server answers: what it routes, and what /openapi.json says."""
    site = _Site(service)

    def generating(name: str, prepare: Callable[[Service, bytes, Arrival], Awaitable[Job]]) -> GenerationEndpoint:
        engine, metrics = service.engine, service.metrics

        async def bound(body: bytes, arrival: Arrival) -> Job:
            return await prepare(service, body, arrival)

        return GenerationEndpoint(name, bound, service.authenticate, engine, service.config, metrics, places)

    def at_once(answer: Answer) -> JsonEndpoint:
        return JsonEndpoint(service, answer, places)

    reset = JsonEndpoint(service, reset_prefix_cache, needs_admin=True)
    return [
        Operation(
            "POST", "/v1/completions", generating("completions", prepare_completion), "Go on with a text or token ids.",
            body=CompletionFields, statuses=GENERATES, media=_STREAMS,
        ),
        Operation(
            "POST", "/v1/chat/completions", generating("chat", prepare_chat), "Answer a conversation.",
            body=ChatFields, statuses=GENERATES, media=_STREAMS,
        ),
        Operation(
            "POST", "/v1/responses", generating("responses", prepare_response), "Answer a conversation.",
            body=ResponsesFields, statuses=GENERATES, media=_STREAMS,
        ),
        Operation(
            "POST", "/v1/embeddings", generating("embeddings", prepare_embeddings), "Texts or token ids as vectors.",
            body=EmbeddingFields, statuses=GENERATES,
        ),
        Operation(
            "POST", "/tokenize", at_once(tokenize), "A text or a conversation as token ids.",
            body=TokenizeFields, statuses=ANSWERS_AT_ONCE,
        ),
        Operation(
            "POST", "/detokenize", at_once(detokenize), "Token ids as a text.",
            body=DetokenizeFields, statuses=ANSWERS_AT_ONCE,
        ),
        Operation(
            "POST", "/reset_prefix_cache", reset, "Forget everything cached.", access="admin",
            body=ResetFields, body_is_optional=True, statuses=(*REFUSES_BODIES, 409, 503, 504),
        ),
        Operation(
            "POST", "/forget_prefix_cache", JsonEndpoint(service, ToCaller(forget_prefix_cache)),
            "Let nobody find what is cached of a prompt, a salt, an adapter or a tenant.",
            body=ForgetFields, statuses=(*REFUSES_BODIES, 403, 503, 504),
        ),
        Operation(
            "POST", "/v1/load_lora_adapter", JsonEndpoint(service, load_adapter, needs_admin=True),
            "Let requests name a LoRA adapter.", access="admin", body=LoadAdapterFields,
            statuses=(*REFUSES_BODIES, 503, 504),
        ),
        Operation(
            "POST", "/v1/unload_lora_adapter", JsonEndpoint(service, unload_adapter, needs_admin=True),
            "Forget the name of a LoRA adapter.", access="admin", body=UnloadAdapterFields,
            statuses=(*REFUSES_BODIES, 404, 503, 504),
        ),
        Operation("GET", "/v1/models", site.models, "The model and its adapters."),
        Operation("GET", "/v1/models/{model:path}", site.model, "One of them.", statuses=(404,)),
        Operation("GET", "/version", site.version, "The version, and the digest of what the model is."),
        Operation("GET", "/health", site.health, "Whether the engine takes requests.", access="open", statuses=(503,)),
        Operation("GET", "/ready", site.health, "The same.", access="open", statuses=(503,)),
        Operation(
            "GET", "/metrics", site.metrics, "What Prometheus reads.",
            access="open" if service.config.open_metrics else "admin", media=("text/plain",),
        ),
        Operation(
            "GET", "/debug/prefixes", JsonEndpoint(service, busiest_prefixes, needs_admin=True),
            "The cached beginnings that saved the most tokens, by hash.", access="admin", statuses=(503, 504),
        ),
        Operation("GET", "/openapi.json", site.openapi, "This document."),
    ]  # fmt: skip


class _Site:
    """The endpoints that read no body."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """Starting, draining and crashed are one answer here: send no work."""
        if not self._service.engine.is_running:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._service.authenticate(request.scope)
        return JSONResponse({"object": "list", "data": self._models()})

    async def model(self, request: Request) -> Response:
        self._service.authenticate(request.scope)
        name = request.path_params["model"]
        for model in self._models():
            if model["id"] == name:
                return JSONResponse(model)
        raise self._service.no_such_model(name)

    def _models(self) -> list[dict[str, object]]:
        engine, base = self._service.engine.engine, self._service.model_name
        common = {"object": "model", "created": 0, "owned_by": "anaphora", "max_model_len": engine.max_model_len}
        models = [{"id": base, **common}]
        return models + [{"id": adapter.name, **common, "parent": base} for adapter in engine.adapters]

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

    async def openapi(self, request: Request) -> Response:
        self._service.authenticate(request.scope)
        return JSONResponse(request.app.state.description)


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
