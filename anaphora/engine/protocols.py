"""What the engine needs of its surroundings, as protocols: an executor, a tokenizer, a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from anaphora.core.plan import StepPlan, StepResult
from anaphora.sampling_params import SamplingParams

Clock = Callable[[], float]
"""Seconds from any fixed origin; `time.perf_counter` outside tests."""


class Executor(Protocol):
    """Turns a plan into a result: torch (`runtime`), a simulator, a test.

    A call may raise: then the whole step has failed, and the executor has wiped the K/V that it may have written.
    """

    vocab_size: int

    def execute(self, plan: StepPlan) -> StepResult: ...


class WeightUpdate(Protocol):
    """New weights that fit. history: a digest of every update of the model up to and with this one."""

    @property
    def history(self) -> str: ...

    def apply(self) -> None: ...


@runtime_checkable
class HoldsWeights(Protocol):
    """An executor whose model's weights can be changed between steps."""

    def prepare_weights(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> WeightUpdate:
        """Check that all of them fit; changes nothing. Raises WeightsError."""
        ...


class GrammarChecker(Protocol):
    """Knows which grammars an executor can follow. May be called from any thread."""

    def check(self, sampling: SamplingParams) -> None:
        """Raises InvalidParameterError if what a structured output must look like cannot be followed."""
        ...


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that the engine uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
