"""How long a step takes, by a stated formula instead of a clock. Knows a plan's lengths; nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anaphora.core.plan import ScheduledRequest, StepPlan
from anaphora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostModel:
    """seconds of a step = overhead_s + tokens * token_s + pairs * attention_s.

    tokens: scheduled in the step. pairs: (scheduled token, position that it attends to), its own included.
    The defaults are round figures for an 8B model on one data-centre GPU; give your own for yours.
    Raises ConfigError.
    """

    overhead_s: float = 5e-3
    token_s: float = 40e-6
    attention_s: float = 1.5e-9

    def __post_init__(self) -> None:
        for name in ("overhead_s", "token_s", "attention_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} of the cost model must be a number of seconds >= 0, got {value!r}")
        if self.overhead_s == self.token_s == 0:
            raise ConfigError("overhead_s and token_s cannot both be 0: then time would stand still")

    def request_s(self, request: ScheduledRequest) -> float:
        """What one request adds to a step."""
        count = len(request.token_ids)
        pairs = count * request.start + count * (count + 1) // 2
        return count * self.token_s + pairs * self.attention_s

    def step_s(self, plan: StepPlan) -> float:
        """The formula above."""
        return self.overhead_s + sum(map(self.request_s, plan.scheduled))
