"""A plan in the making, and what the control plane keeps of it while it is in flight. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from anaphora.core.ids import BlockHash, BlockId, RequestId
from anaphora.core.plan import Admission, ScheduledRequest
from anaphora.core.request import Request


@dataclass(frozen=True, slots=True)
class InFlight:
    """One scheduled request: what it computes and samples, what becomes findable, whose pending blocks it reads."""

    request: Request
    num_tokens: int
    sample: bool
    staged: list[BlockId]
    shares_with: set[RequestId]


@dataclass(slots=True)
class Step:
    """budget: tokens left to give. preempted: whether somebody lost its blocks for this step.

    frontier: hash of the next full block of a request that is behind its known tokens -> it, and how many full blocks
    it has after this step. pending_writer: block -> the request of this step that writes it.
    """

    budget: int
    preempted: bool = False
    admitted: list[Admission] = field(default_factory=list)
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    in_flight: dict[RequestId, InFlight] = field(default_factory=dict)
    frontier: dict[BlockHash, tuple[Request, int]] = field(default_factory=dict)
    pending_writer: dict[BlockId, RequestId] = field(default_factory=dict)
