"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: what names of adapters stand for. For admins."""

from __future__ import annotations

from typing import Any

from anaphora.engine.adapters import AdapterInfo
from anaphora.errors import (
    AdapterError,
    DuplicateAdapterError,
    EngineStoppedError,
    InvalidParameterError,
    UnknownAdapterError,
)
from anaphora.server.errors import ApiError, as_api_error, invalid
from anaphora.server.fields import LoadAdapterFields, UnloadAdapterFields, parse_fields
from anaphora.server.service import Service


async def load_adapter(service: Service, body: bytes) -> dict[str, Any]:
    """From now on `model` may be lora_name. The path is one of this machine. Raises ApiError."""
    fields = parse_fields(LoadAdapterFields, body)
    if fields.lora_name == service.model_name:
        raise invalid("lora_name", f"{fields.lora_name!r} is the model itself: choose another name")
    try:
        info = await service.engine.load_adapter(fields.lora_name, fields.lora_path, replace=bool(fields.load_inplace))
    except DuplicateAdapterError as error:
        raise invalid("lora_name", f"{error} (load_inplace: true)", "adapter_exists") from None
    except AdapterError as error:
        raise invalid("lora_path", str(error), "invalid_adapter") from None
    except InvalidParameterError as error:
        raise invalid("lora_name", str(error)) from None
    except EngineStoppedError as error:
        raise as_api_error(error, prompt="") from None
    return _shown(info) | {"rank": info.rank, "num_bytes": info.num_bytes}


async def unload_adapter(service: Service, body: bytes) -> dict[str, Any]:
    """Forget the name; what runs with it goes on. Raises ApiError."""
    fields = parse_fields(UnloadAdapterFields, body)
    try:
        return _shown(await service.engine.unload_adapter(fields.lora_name))
    except UnknownAdapterError as error:
        raise ApiError(404, str(error), param="lora_name", code="adapter_not_found") from None
    except EngineStoppedError as error:
        raise as_api_error(error, prompt="") from None


def _shown(info: AdapterInfo) -> dict[str, Any]:
    return {"lora_name": info.name, "identity": f"sha256:{info.digest}"}
