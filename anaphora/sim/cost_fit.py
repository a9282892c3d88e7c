"""A cost model from measurements: least squares over the times to first token that `anaphora bench --json` has.

    ttft_s ≈ overhead + tokens * t + pairs * a        tokens: prompt - cached; pairs: (token, position it attends to)

Only requests that had the engine for themselves (concurrency 1) and computed their prompt in one step say this much.
Knows the document's `requests`; must not know how they were measured.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError
from anaphora.sim.cost_model import CostModel, num_pairs

_MIN_LENGTHS = 3  # as many unknowns


@dataclass(frozen=True, slots=True)
class FittedCost:
    """residual_s: root of the mean square of what the model leaves unexplained. largest_residual_s: its largest."""

    model: CostModel
    num_requests: int
    residual_s: float
    largest_residual_s: float


def read_cost(path: Path) -> FittedCost:
    """Fit the requests of a bench document. Raises ConfigError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--cost-from: {path} cannot be read: {error}") from error
    requests = document.get("requests") if isinstance(document, dict) else None
    if not isinstance(requests, list):
        raise ConfigError(f"--cost-from: {path} has no list `requests`: make it with `anaphora bench --json`")
    try:
        return fit_cost([row for entry in requests if (row := _row(entry)) is not None])
    except ConfigError as error:
        raise ConfigError(f"--cost-from: {path}: {error}") from error


def fit_cost(rows: list[tuple[int, int, float]]) -> FittedCost:
    """rows: (prompt tokens, cached tokens, seconds to the first token). No part of the cost is negative.

    Raises ConfigError.
    """
    import numpy as np

    lengths = {prompt - cached for prompt, cached, _ in rows}
    if len(lengths) < _MIN_LENGTHS:
        raise ConfigError(
            f"{len(rows)} requests of concurrency 1 computed {len(lengths)} different numbers of tokens; a fit takes "
            f"{_MIN_LENGTHS} or more: bench prompts of several lengths"
        )
    terms = np.array([[1.0, p - c, num_pairs(c, p - c)] for p, c, _ in rows])
    times = np.array([ttft_s for _, _, ttft_s in rows])
    scale = terms.max(axis=0)
    best, least = np.zeros(3), math.inf
    # Of every set of terms the one that fits best and has no negative factor: with three terms, that is quickly tried.
    for used in (list(some) for size in (1, 2, 3) for some in itertools.combinations(range(3), size)):
        factors = np.zeros(3)
        factors[used] = np.linalg.lstsq((terms / scale)[:, used], times, rcond=None)[0]
        squares = float(((terms / scale @ factors - times) ** 2).sum())
        if (factors >= 0).all() and squares < least:
            best, least = factors, squares
    overhead_s, token_s, attention_s = (float(factor) for factor in best / scale)
    residuals = np.abs(terms / scale @ best - times)
    return FittedCost(
        CostModel(overhead_s, token_s, attention_s),
        len(rows),
        float(np.sqrt((residuals**2).mean())),
        float(residuals.max()),
    )


def _row(entry: Any) -> tuple[int, int, float] | None:
    """None for a request that shared the engine. Raises ConfigError for what is no measurement."""
    if not isinstance(entry, dict):
        raise ConfigError(f"a request must be an object, got {type(entry).__name__}")
    if entry.get("concurrency", 1) != 1:
        return None
    prompt, cached, ttft_s = (entry.get(field) for field in ("prompt_tokens", "cached_tokens", "ttft_s"))
    if type(prompt) is not int or type(cached) is not int or not 0 <= cached < prompt:
        raise ConfigError(f"prompt_tokens and cached_tokens must be integers, the first one larger: {entry!r:.200}")
    if isinstance(ttft_s, bool) or not isinstance(ttft_s, int | float) or not 0 < ttft_s < math.inf:
        raise ConfigError(f"ttft_s must be a number of seconds > 0: {entry!r:.200}")
    return prompt, cached, float(ttft_s)
