"""What an event adds to the counters, and what it makes of a request's own counts. Honest counting, in one place.

Knows requests and counters; must not know blocks or order.
"""

from __future__ import annotations

from anaphora.core.request import Request
from anaphora.core.stats import Counters


def admitted(counters: Counters, request: Request, num_hit_tokens: int) -> None:
    """A request has got its blocks. Its first admission is its query; later ones are counted apart."""
    if request.was_admitted:
        counters.num_requeried_tokens += request.num_tokens
        counters.num_rehit_tokens += num_hit_tokens
    else:
        request.was_admitted = True
        request.num_cached_tokens = num_hit_tokens
        if request.bypasses_cache:
            counters.num_bypassed_tokens += request.num_tokens
        else:
            counters.num_queried_tokens += request.num_tokens
            counters.num_hit_tokens += num_hit_tokens
    request.furthest_computed = max(request.furthest_computed, num_hit_tokens)


def computed(counters: Counters, request: Request, num_tokens: int) -> None:
    """A step has computed the next num_tokens tokens. What had been computed before a preemption is recomputed."""
    stop = request.num_computed_tokens + num_tokens
    new_from = max(request.num_computed_tokens, request.furthest_computed)
    counters.num_computed_tokens += num_tokens
    counters.num_recomputed_tokens += min(stop, new_from) - request.num_computed_tokens
    counters.num_computed_prompt_tokens += max(0, min(stop, request.num_prompt_tokens) - new_from)
    request.num_computed_tokens = stop
    request.furthest_computed = max(stop, request.furthest_computed)


def preempted(counters: Counters, request: Request) -> None:
    """A running request has lost its blocks."""
    counters.num_preemptions += 1
    request.num_preemptions += 1


def ended(counters: Counters, reason: str) -> None:
    """A request has ended with this finish reason."""
    if reason == "abort":
        counters.num_aborted_requests += 1
    elif reason == "error":
        counters.num_failed_requests += 1
    else:
        counters.num_finished_requests += 1
