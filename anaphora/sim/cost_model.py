"""How long a step takes, by a stated formula instead of a clock. Knows a plan's lengths; nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anaphora.core.plan import ScheduledRequest, StepPlan
from anaphora.errors import ConfigError


def num_pairs(start: int, count: int) -> int:
    """(token, position it attends to) of `count` tokens in a row, of which the first one is at position `start`."""
    return count * start + count * (count + 1) // 2


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
        return count * self.token_s + num_pairs(request.start, count) * self.attention_s

    def step_s(self, plan: StepPlan) -> float:
        """The formula above."""
        return self.overhead_s + sum(map(self.request_s, plan.scheduled))


_FIELDS = {"overhead": "overhead_s", "token": "token_s", "attention": "attention_s"}
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_cost(text: str) -> CostModel:
    """`overhead=5ms,token=40us,attention=1.5ns`, in any order; what is left out keeps its default.

    A number without a unit is seconds. Raises ConfigError.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, amount = (piece.strip() for piece in part.partition("="))
        number = amount.rstrip("munsµ")
        unit = amount[len(number) :].replace("µ", "u")
        try:
            field = _FIELDS[name]
            seconds = float(number) * _UNITS[unit]
        except (KeyError, ValueError):
            raise ConfigError(
                f"a cost must look like overhead=5ms,token=40us,attention=1.5ns (s, ms, us or ns), got {text!r}"
            ) from None
        if field in values:
            raise ConfigError(f"a cost says {name} twice: {text!r}")
        values[field] = seconds
    return CostModel(**values)
