"""One structured line per request: counts and times, never text, keys or salts. Knows `logging` only."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict

from anaphora.engine.outputs import RequestOutput
from anaphora.engine.ttft import TtftParts

_logger = logging.getLogger("anaphora.access")


def log_request(
    endpoint: str, outcome: str, tenant: str | None, num_requests: int, outputs: Sequence[RequestOutput]
) -> None:
    """outputs: of those of its requests that finished. Times are of the first of them."""
    if not _logger.isEnabledFor(logging.INFO):
        return
    first = outputs[0] if outputs else None
    line = {
        "endpoint": endpoint,
        "outcome": outcome,
        "tenant": tenant,
        "num_requests": num_requests,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "computed_tokens": sum(output.metrics.num_computed_prompt_tokens for output in outputs),
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "ttft_s": _rounded(first.metrics.ttft_s if first else None),
        "ttft_parts": _rounded_parts(first.metrics.ttft_parts if first else None),
        "e2e_s": _rounded(first.metrics.e2e_s if first else None),
    }
    _logger.info(json.dumps(line))


def _rounded_parts(parts: TtftParts | None) -> dict[str, float] | None:
    return None if parts is None else {name: round(seconds, 6) for name, seconds in asdict(parts).items()}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
