"""An executor without a model: every sampled token is 0, and the time is what the cost model says."""

from __future__ import annotations

from anaphora.core.ids import TokenId
from anaphora.core.plan import SampledToken, StepPlan, StepResult
from anaphora.sim.cost_model import CostModel


class SimulatedExecutor:
    """Follows engine.protocols.Executor. Keeps nothing between steps."""

    vocab_size = 1

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def execute(self, plan: StepPlan) -> StepResult:
        token = SampledToken(TokenId(0))
        sampled = {request.request_id: token for request in plan.scheduled if request.sample}
        return StepResult(sampled, compute_s=self._cost_model.step_s(plan))
