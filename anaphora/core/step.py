"""A plan in the making, and what the control plane keeps of it while it is in flight. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from anaphora.core.frontier import Frontier
from anaphora.core.hit import Hit
from anaphora.core.ids import BlockId, RequestId
from anaphora.core.plan import Admission, ScheduledRequest
from anaphora.core.request import Request
from anaphora.core.staged import Staged


@dataclass(frozen=True, slots=True)
class InFlight:
    """One scheduled request: what it computes and samples, what becomes findable, whose pending blocks it reads."""

    request: Request
    num_tokens: int
    sample: bool
    staged: Staged
    shares_with: set[RequestId]


@dataclass(slots=True)
class Step:
    """budget: tokens left to give. preempted: whether somebody lost its blocks for this step.

    frontier: where those are who are behind their known tokens. pending_writer, pending_side_writer: block of the
    spine, or of a side group -> the request of this step that writes it.
    """

    budget: int
    preempted: bool = False
    admitted: list[Admission] = field(default_factory=list)
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    in_flight: dict[RequestId, InFlight] = field(default_factory=dict)
    frontier: Frontier = field(default_factory=Frontier)
    pending_writer: dict[BlockId, RequestId] = field(default_factory=dict)
    pending_side_writer: dict[BlockId, RequestId] = field(default_factory=dict)

    def note_writer(self, request_id: RequestId, staged: Staged) -> None:
        for block in staged.blocks:
            self.pending_writer[block] = request_id
        for blocks in staged.sides:
            for block in blocks:
                self.pending_side_writer[block] = request_id

    def writers(self, hit: Hit) -> set[RequestId]:
        """Whose pending blocks a hit uses."""
        writers = {self.pending_writer[block] for block in hit.blocks[hit.num_committed :]}
        return writers.union(self.pending_side_writer[block] for block in hit.pending_sides)
