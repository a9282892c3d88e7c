"""What an operator may see of the cache. Hashes and counts, never tokens or text. Must not know HTTP."""

from __future__ import annotations

from typing import Any

from anaphora.server.service import Service

_MOST_PREFIXES = 20
_HASH_DIGITS = 16


async def busiest_prefixes(service: Service, body: bytes) -> dict[str, Any]:
    """The beginnings that saved the most tokens. Raises EngineStoppedError."""
    prefixes = await service.engine.busiest_prefixes(_MOST_PREFIXES)
    return {
        "prefixes": [
            {
                "hash": prefix.block_hash.hex()[:_HASH_DIGITS],
                "num_tokens": prefix.num_tokens,
                "num_requests": prefix.num_requests,
                "num_hit_tokens": prefix.num_hit_tokens,
            }
            for prefix in prefixes
        ]
    }
