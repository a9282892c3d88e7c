"""What every endpoint of one server shares: the engine, the tokenizer, the limits, who may call. Knows no URL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.types import Scope

from anaphora.engine.async_engine import AsyncEngine
from anaphora.engine.chat_template import Message
from anaphora.engine.image_parts import chat_prompt, take_images
from anaphora.engine.multimodal import NamedImage, PreparedPrompt
from anaphora.errors import RequestError
from anaphora.salt_regions import CacheSalt, SaltRegions
from anaphora.sampling_params import SamplingParams
from anaphora.server.arrival import Arrival
from anaphora.server.config import ServerConfig
from anaphora.server.errors import ApiError, as_api_error
from anaphora.server.fields import ConversationFields, RequestFields, parse_fields
from anaphora.server.image_fetches import ImageFetches
from anaphora.server.messages import template_messages
from anaphora.server.metrics import Metrics
from anaphora.server.tenants import ANYBODY, ApiKeys, CacheDomains, Caller
from anaphora.server.text import TextTools

MAX_TEMPLATE_OPTIONS = 64
_SMALL_BODY_BYTES = 16 * 1024
_T = TypeVar("_T")
_Fields = TypeVar("_Fields", bound=RequestFields)


@dataclass(frozen=True, slots=True)
class Service:
    """api_keys: None lets anybody call, and do everything."""

    engine: AsyncEngine
    text: TextTools
    config: ServerConfig
    metrics: Metrics
    domains: CacheDomains
    api_keys: ApiKeys | None
    model_name: str
    image_fetches: ImageFetches

    def authenticate(self, scope: Scope) -> Caller:
        """Who calls, by `Authorization: Bearer KEY`. Raises ApiError."""
        if self.api_keys is None:
            return ANYBODY
        header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        scheme, _, key = header.partition(" ")
        caller = self.api_keys.find(key.strip()) if scheme.lower() == "bearer" and key.strip() else None
        if caller is None:
            hint = "give a valid key: Authorization: Bearer KEY"
            raise ApiError(401, hint, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return caller

    def authenticate_admin(self, scope: Scope) -> Caller:
        """As authenticate, and the caller must be an admin."""
        caller = self.authenticate(scope)
        if not caller.is_admin:
            raise ApiError(403, "this needs an admin key", code="admin_key_required")
        return caller

    def memo_domain(self, caller: Caller, cache_salt: CacheSalt | None) -> str | None:
        """Who may learn what was tokenised before: those who share cached beginnings. No salt of a client is empty.

        None, and nothing is remembered, where salts begin inside the prompt: its text is of several domains.
        """
        domain = self.domains.salt(caller, cache_salt)
        return None if isinstance(domain, SaltRegions) else domain or ""

    async def parse(self, kind: type[_Fields], body: bytes, arrival: Arrival | None = None) -> _Fields:
        """A body as its model; a large one beside the event loop. arrival: what takes the time. Raises ApiError."""
        parse: Callable[[type[_Fields], bytes], _Fields] = parse_fields
        if arrival is not None:
            parse = arrival.tokenizing(parse)
        small = len(body) <= _SMALL_BODY_BYTES
        fields = parse(kind, body) if small else await self.engine.in_worker(parse, kind, body)
        adapter = self.adapter_of(fields)
        if adapter is not None and adapter not in {info.name for info in self.engine.engine.adapters}:
            raise self.no_such_model(adapter)
        return fields

    def no_such_model(self, name: str) -> ApiError:
        message = f"this server has no model {name!r}, it serves {self.model_name!r}; see GET /v1/models"
        return ApiError(404, message, param="model", code="model_not_found")

    def adapter_of(self, fields: RequestFields) -> str | None:
        """The adapter that `model` names; None for the model itself."""
        return None if fields.model in (None, self.model_name) else fields.model

    def name_of(self, fields: RequestFields) -> str:
        """What the reply calls the model."""
        return self.adapter_of(fields) or self.model_name

    async def on_worker(self, prompt_field: str, work: Callable[[], _T], names: Mapping[str, str] | None = None) -> _T:
        """Tokenise or render on a worker thread. Raises ApiError; see errors.as_api_error for the names."""
        try:
            return await self.engine.in_worker(work)
        except RequestError as error:
            raise as_api_error(error, prompt=prompt_field, names=names) from None

    def with_room(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The same with max_tokens as large as the context limit, or without one the pool, leaves room for."""
        engine = self.engine.engine
        limit = engine.max_model_len or engine.capacity_tokens + 1
        return replace(params, max_tokens=max(1, params.min_tokens, limit - num_prompt_tokens))

    def render(self, fields: ConversationFields, *, default_generation_prompt: bool = True) -> str:
        """A conversation as text. Slow: for a worker thread. Raises ApiError, RequestError."""
        generation_prompt = fields.add_generation_prompt
        return self.text.render(
            template_messages(fields.messages or ()),
            tools=fields.tools or None,
            add_generation_prompt=default_generation_prompt if generation_prompt is None else generation_prompt,
            template_options=fields.chat_template_kwargs,
        )

    def chat_prompt(
        self,
        fields: ConversationFields,
        *,
        memo_domain: str | None = None,
        fetched: Callable[[NamedImage], bytes] | None = None,
    ) -> tuple[str, list[int] | PreparedPrompt]:
        """A conversation as text, and ready for the engine. For a worker thread. fetched: what `fetch_images` gave.

        Raises ApiError, RequestError.
        """
        engine = self.engine.engine
        if engine.image_token is None:
            text = self.render(fields)
            return text, self.text.prompt_ids(text, add_special_tokens=False, memo_domain=memo_domain)
        generation_prompt = fields.add_generation_prompt is not False

        def render(messages: Sequence[Message]) -> str:
            return self.text.render(
                messages,
                tools=fields.tools or None,
                add_generation_prompt=generation_prompt,
                template_options=fields.chat_template_kwargs,
            )

        prompt = chat_prompt(engine, template_messages(fields.messages or (), with_images=True), render, fetched)
        engine.check_fits(len(prompt))
        return prompt.text or "", prompt

    async def fetch_images(self, fields: ConversationFields) -> Callable[[NamedImage], bytes] | None:
        """The images of a conversation that are elsewhere, all fetched; None if this server fetches none.

        Not on the worker threads, which other requests' texts wait for; and texts alone wait for no fetch. Raises
        ApiError.
        """
        engine = self.engine.engine
        if engine.image_token is None or not self.config.allow_remote_images:
            return None

        def named() -> list[NamedImage]:
            _, images = take_images(template_messages(fields.messages or (), with_images=True))
            engine.check_num_images(len(images), "messages")
            return [image for image in images if isinstance(image.image, str)]

        try:
            elsewhere = await self.engine.in_worker(named)
            found = await self.image_fetches.fetch(elsewhere) if elsewhere else {}
        except RequestError as error:
            raise as_api_error(error, prompt="messages") from None
        return lambda image: found[image.field]

    def check_conversation(self, fields: ConversationFields) -> None:
        """The limits, and what this model's template cannot show. Raises ApiError."""
        for name, values, most in (
            ("messages", fields.messages, self.config.max_messages),
            ("tools", fields.tools, self.config.max_tools),
        ):
            if values is None:
                continue
            if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
                raise ApiError(400, f"{name} must be a list of objects", param=name, code="invalid_type")
            if len(values) > most:
                raise ApiError(400, f"{name} has {len(values)} entries, at most {most} are allowed", param=name)
        if fields.tools and not self.text.template_reads_tools:
            message = "the chat template of this model reads no tools: leave them out, or use another model"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        _check_options(fields.chat_template_kwargs or {})


def _check_options(options: Collection[str]) -> None:
    if len(options) > MAX_TEMPLATE_OPTIONS:
        message = f"chat_template_kwargs has {len(options)} entries, at most {MAX_TEMPLATE_OPTIONS} are allowed"
        raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
    for name in options:
        if name in _RESERVED_OPTIONS:
            message = f"chat_template_kwargs may not set {name!r}; it holds variables of the template only"
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")


_RESERVED_OPTIONS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
"""Arguments of `apply_chat_template` that are no variables of the template."""
