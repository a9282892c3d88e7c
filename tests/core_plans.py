"""Short forms of a plan, for tests that compare whole plans."""

from __future__ import annotations

from anaphora.core.plan import StepPlan


def summary(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request, start, scheduled tokens) of each scheduled request, in order."""
    return [(entry.request_id, entry.start, len(entry.token_ids)) for entry in plan.scheduled]


def tables(plan: StepPlan) -> dict[str, tuple[int, ...]]:
    """Request -> the blocks that this plan appends to its table, where there is one group."""
    return {entry.request_id: blocks for entry in plan.scheduled for (blocks,) in [entry.new_block_ids]}
