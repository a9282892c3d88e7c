"""n sequences for one prompt: n requests of the engine below, one output above. Knows outputs only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anaphora.engine.outputs import RequestOutput, StepOutput


class Choices:
    """Gathers the outputs of `count` requests for the same prompt, each known by its index."""

    def __init__(self, count: int, prompt: str | Sequence[int] | None) -> None:
        self._prompt = prompt if isinstance(prompt, str) else None
        self._outputs: list[RequestOutput | None] = [None] * count

    def add(self, index: int, step: StepOutput) -> StepOutput:
        """What request `index` gained, as something that the prompt's one request gained; the whole in the last one."""
        if len(self._outputs) == 1:
            return step
        if step.output is not None:
            self._outputs[index] = step.output
        finished = [output for output in self._outputs if output is not None]
        whole = self._gather(finished) if step.finished and len(finished) == len(self._outputs) else None
        return replace(step, index=index, output=whole)

    def _gather(self, outputs: list[RequestOutput]) -> RequestOutput:
        first, metrics = outputs[0], [output.metrics for output in outputs]
        return replace(
            first,
            prompt=self._prompt,
            outputs=[replace(output.outputs[0], index=index) for index, output in enumerate(outputs)],
            metrics=replace(
                metrics[0],
                e2e_s=max(each.e2e_s for each in metrics),
                num_preemptions=sum(each.num_preemptions for each in metrics),
                num_computed_prompt_tokens=sum(each.num_computed_prompt_tokens for each in metrics),
            ),
            error=next((output.error for output in outputs if output.error is not None), None),
        )
