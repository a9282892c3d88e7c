"""What only an operator may do to a running server. Must not know HTTP."""

from __future__ import annotations

from typing import Any

from anaphora.server.errors import ApiError
from anaphora.server.fields import RequestFields
from anaphora.server.service import Service


class ResetFields(RequestFields):
    """preempt_running: let requests that hold blocks compute theirs anew, instead of refusing."""

    preempt_running: bool | None = None


async def reset_prefix_cache(service: Service, body: bytes) -> dict[str, Any]:
    """Forget everything cached. Raises EngineStoppedError, and ApiError: 409 if nothing was done as requests run."""
    fields = await service.parse(ResetFields, body if body.strip() else b"{}")
    if await service.engine.reset_prefix_cache(preempt_running=bool(fields.preempt_running)):
        return {"reset": True}
    message = "requests hold blocks: nothing was reset. Wait until they end, or send preempt_running: true"
    raise ApiError(409, message, code="cache_in_use", extra={"reset": False})
