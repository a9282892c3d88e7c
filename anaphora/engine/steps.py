"""One step after the other: schedule, execute, update, and what each request gained of it.

Knows the scheduler, an executor and the requests that live; must not know how requests come, adapters or weights.

    schedule -> execute -> update -> text      success: one StepOutput for each request that gained something
                   |
                   +-> fail                    an exception: the requests of this step end, the others go on
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from anaphora.core.ids import RequestId
from anaphora.core.plan import SampledToken, StepPlan, StepResult
from anaphora.core.scheduler import RequestUpdate, Scheduler
from anaphora.engine.live_request import LiveRequest
from anaphora.engine.one_at_a_time import OneAtATime
from anaphora.engine.outputs import EngineTimes, StepOutput
from anaphora.engine.protocols import Clock, Executor

_logger = logging.getLogger(__name__)


class Steps:
    """live: the requests that the scheduler has. end: takes one of them out of it and of all that it holds."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        calls: OneAtATime,
        live: Mapping[str, LiveRequest],
        end: Callable[[str], LiveRequest],
    ) -> None:
        self.times = EngineTimes()
        self.undelivered: dict[str, StepOutput] = {}  # ended outside of a step, or in one that an interrupt cut short
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._calls = calls
        self._live = live
        self._end = end

    def step(self) -> list[StepOutput]:
        """See Engine.step."""
        if self.undelivered:
            outputs, self.undelivered = list(self.undelivered.values()), {}
            return outputs
        begin_s = self._clock()
        with self._calls.bookkeeping():
            plan = self._scheduler.schedule(begin_s)
        planned_s = self._clock()
        self.times.schedule_s += planned_s - begin_s
        if plan is None:
            if self._live:
                raise RuntimeError(f"{len(self._live)} requests wait and none can run: a bug in the scheduler")
            return []
        starting = [live for r in plan.scheduled if not (live := self._live[r.request_id]).has_begun]
        for live in starting:
            live.ttft.enter("compute_s", planned_s)
        try:
            result = self._executor.execute(plan)
        except BaseException as error:
            return self._failed(plan, error)
        executed_s = self._clock()
        for live in starting:
            live.ttft.executed(executed_s, result.sample_s)
        self.times.execute_s += executed_s - planned_s
        self.times.compute_s += result.compute_s
        self.times.sample_s += result.sample_s
        return self._updated(plan, result, executed_s)

    def _failed(self, plan: StepPlan, error: BaseException) -> list[StepOutput]:
        """The ends of this step's requests. What is no Exception goes on to the caller, and they come with the next."""
        failed = self._scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")
        outputs = self._outputs(plan, failed, {}, self._clock())
        if not isinstance(error, Exception):
            self.undelivered = {output.request_id: output for output in outputs}
            raise error
        _logger.error("step %d failed; its %d requests end", plan.step, len(plan.scheduled), exc_info=error)
        return outputs

    def _updated(self, plan: StepPlan, result: StepResult, executed_s: float) -> list[StepOutput]:
        with self._calls.bookkeeping():
            updates = self._scheduler.update(plan, result)
        updated_s = self._clock()
        self.times.update_s += updated_s - executed_s
        for update in updates:
            if update.error is None and (embedding := result.embeddings.get(update.request.request_id)):
                self._live[update.request.request_id].embedding = embedding
        outputs = self._outputs(plan, updates, result.prompt_logprobs, updated_s)
        self.times.output_s += self._clock() - updated_s
        return outputs

    def _outputs(
        self,
        plan: StepPlan,
        updates: list[RequestUpdate],
        prompt_logprobs: Mapping[RequestId, Sequence[SampledToken]],
        now_s: float,
    ) -> list[StepOutput]:
        scheduled = {request.request_id: request for request in plan.scheduled}
        outputs = []
        for update in updates:
            request_id = update.request.request_id
            live = self._live[request_id]
            if not live.has_begun and update.error is None:
                live.num_computed_prompt_tokens += len(scheduled[request_id].token_ids)
            scores = scheduled[request_id].start + 1, prompt_logprobs.get(request_id, ())
            output = self._advance(live, update, scores, now_s)
            if output is not None:
                outputs.append(output)
        return outputs

    def _advance(
        self, live: LiveRequest, update: RequestUpdate, scores: tuple[int, Sequence[SampledToken]], now_s: float
    ) -> StepOutput | None:
        """Take one request's update: its token becomes text, and a stop string may end it.

        scores: what the step says of its prompt, from which position on.
        """
        request, reason, error = update.request, update.finish_reason, update.error
        output = None
        try:
            if error is None:
                live.add_prompt_logprobs(*scores)
            if update.token is not None:
                output = live.add_token(update.token, now_s, ends_output=reason == "stop")
        except Exception as failure:  # the tokenizer is foreign code: it may cost one request, never the engine
            _logger.error("the tokenizer failed on request %s", request.request_id, exc_info=failure)
            error = f"the tokenizer failed: {type(failure).__name__}: {failure}"
        ending = "error" if error is not None else "stop" if live.matched_stop is not None else None
        if ending is not None and reason is None:
            self._scheduler.finish(request.request_id, ending)
        reason = ending or reason
        if reason is None:
            return output
        self._end(request.request_id)
        return live.finish(output, reason, error, now_s)
