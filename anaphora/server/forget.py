"""`/forget_prefix_cache`: a tenant, a salt, an adapter or a prefix whose cached beginnings nobody is to find any more.

Knows whose is what; must not know how things are forgotten. A caller may forget what is its tenant's; an admin also
what is another tenant's, and adapters, which are everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anaphora.errors import RequestError, UnknownAdapterError
from anaphora.salt_regions import SaltRegions
from anaphora.server.errors import ApiError, as_api_error, invalid
from anaphora.server.fields import RequestFields
from anaphora.server.sampling import parse_salt
from anaphora.server.service import Service
from anaphora.server.tenants import Caller


class ForgetFields(RequestFields):
    """tenant: whose; the caller's own if absent. prompt: a text or token ids, with cache_salt and model as a request
    gives them. One of prompt, cache_salt, adapter (a loaded name or a digest in hex) and tenant says what is forgotten,
    the first of these that is given.
    """

    tenant: str | None = None
    cache_salt: Any = None
    adapter: str | None = None
    prompt: Any = None
    add_special_tokens: bool | None = None


async def forget_prefix_cache(service: Service, caller: Caller, body: bytes) -> dict[str, Any]:
    """Requests that are under way go on; those that come later find nothing of it. Raises ApiError, EngineStoppedError.

    The reply says what was forgotten, and of a prompt how many tokens: those of its full blocks.
    """
    fields = await service.parse(ForgetFields, body)
    owner = _owner(service, caller, fields.tenant)
    salt = parse_salt(fields.cache_salt)
    if fields.adapter is not None and (fields.prompt is not None or salt is not None or fields.tenant is not None):
        raise invalid("adapter", "an adapter is forgotten alone, for everybody; with a prompt, name it as model")
    if fields.prompt is None and (fields.add_special_tokens is not None or service.adapter_of(fields) is not None):
        raise invalid("prompt", "model and add_special_tokens say which prompt is meant: give one")
    try:
        if fields.prompt is not None:
            token_ids = await _token_ids(service, fields)
            engine_salt = service.domains.salt(owner, salt)
            num_tokens = await service.engine.forget(
                prefix=token_ids, salt=engine_salt, adapter=service.adapter_of(fields)
            )
            return {"forgotten": "prompt", "num_tokens": num_tokens}
        if salt is not None:
            if isinstance(salt, SaltRegions):
                raise invalid("cache_salt", "a salt is forgotten wherever it begins: give it as a string")
            await service.engine.forget(salt=service.domains.salt(owner, salt))
            return {"forgotten": "cache_salt"}
        if fields.adapter is not None:
            if not caller.is_admin:
                raise ApiError(403, "adapters are everybody's: this needs an admin key", code="admin_key_required")
            await service.engine.forget(adapter=fields.adapter)
            return {"forgotten": "adapter"}
    except UnknownAdapterError as error:
        raise ApiError(404, str(error), param="adapter", code="adapter_not_found") from None
    except RequestError as error:
        raise as_api_error(error, prompt="prompt") from None
    if fields.tenant is None or owner.tenant is None:
        raise invalid(None, "say what to forget: prompt, cache_salt, adapter or tenant; all of it: /reset_prefix_cache")
    service.domains.forget(owner.tenant)
    return {"forgotten": "tenant"}


def _owner(service: Service, caller: Caller, tenant: str | None) -> Caller:
    """Whose cache is meant. Raises ApiError."""
    if tenant is None or tenant == caller.tenant:
        return caller
    if not caller.is_admin:
        raise ApiError(403, "another tenant's cache needs an admin key", param="tenant", code="admin_key_required")
    if service.api_keys is None or tenant not in service.api_keys.tenants:
        raise invalid("tenant", f"no key of this server is of a tenant {tenant!r}")
    return replace(caller, tenant=tenant)


async def _token_ids(service: Service, fields: ForgetFields) -> Sequence[int]:
    prompt = fields.prompt
    if isinstance(prompt, str):
        special = fields.add_special_tokens is not False
        return await service.on_worker("prompt", lambda: service.text.encode(prompt, add_special_tokens=special))
    if not isinstance(prompt, list) or fields.add_special_tokens is not None:
        message = "prompt must be a string, or a list of token ids without add_special_tokens"
        raise invalid("prompt", message, "invalid_type")
    return prompt
