"""What completions and chat completions share: n choices of each prompt, usage, chunks. Knows no text format."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from anaphora.engine.async_engine import NewRequest
from anaphora.engine.outputs import CompletionOutput, RequestOutput, StepOutput
from anaphora.sampling_params import SamplingParams
from anaphora.server.connection import event
from anaphora.server.errors import invalid, unsupported
from anaphora.server.fields import ChoiceFields
from anaphora.server.generation import Arrival, Job
from anaphora.server.sampling import parse_salt
from anaphora.server.service import Service
from anaphora.server.shapes import prompt_logprobs, timing, usage_of


class ChoicesJob(Job):
    """Several prompts with n choices each; choice index = prompt index * n + i."""

    id_prefix: str
    kind: str  # `object` of the reply
    chunk_kind: str  # `object` of a chunk
    top_prompt_ids: bool  # where the prompt's ids go: into the reply, or into each choice

    def __init__(
        self,
        service: Service,
        fields: ChoiceFields,
        arrival: Arrival,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> None:
        self.fields = fields
        self.prompts = prompts
        self.n = params.n
        self.stream = bool(fields.stream)
        self.num_logprobs = params.logprobs
        salt = service.domains.salt(arrival.caller, parse_salt(fields.cache_salt))
        self.requests = [
            NewRequest(
                prompt, choice, cache_salt=salt, priority=fields.priority or 0, adapter=service.adapter_of(fields)
            )
            for prompt in prompts
            for choice in params.choices()
        ]
        self._arrival = arrival
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name_of(fields),
        }
        options = fields.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._chunk_usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        self._begun: set[int] = set()

    # -- the text format of the endpoint -------------------------------------------------------------------------------

    @abstractmethod
    def whole(self, index: int, output: RequestOutput, first: RequestOutput) -> dict[str, Any]:
        """What a choice of the reply says besides index and reasons. first: the prompt's first choice: it scores it."""

    @abstractmethod
    def delta(self, index: int, step: StepOutput, is_first: bool) -> dict[str, Any]:
        """What a chunk's choice says besides index and reasons."""

    def finish_reason(self, index: int, completion: CompletionOutput) -> str | None:
        return completion.finish_reason

    # -- Job -----------------------------------------------------------------------------------------------------------

    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            completion, first = output.outputs[0], outputs[index // self.n * self.n]
            choice = {"index": index, **self.whole(index, output, first), **self._end(index, output)}
            if self.fields.return_token_ids:
                choice["token_ids"] = list(completion.token_ids)
                if not self.top_prompt_ids:
                    choice["prompt_token_ids"] = list(output.prompt_token_ids)
            if self.fields.prompt_logprobs is not None and not self.top_prompt_ids:
                choice["prompt_logprobs"] = prompt_logprobs(first)
            choices.append(choice)
        reply = {**self._head, "object": self.kind, "choices": choices, "usage": usage_of(outputs, self.n)}
        if self.fields.return_token_ids and self.top_prompt_ids:
            reply["prompt_token_ids"] = list(self.prompts[0])
        if self.fields.prompt_logprobs is not None and self.top_prompt_ids:
            reply["prompt_logprobs"] = prompt_logprobs(outputs[0])
        return reply

    def step_events(self, index: int, step: StepOutput) -> Iterable[bytes]:
        is_first = index not in self._begun
        self._begun.add(index)
        if not (is_first or step.text or step.finished or step.logprobs or self.fields.return_token_ids):
            return  # the token's text is not certain yet
        choice = {"index": index, **self.delta(index, step, is_first)}
        if step.output is None:
            choice["finish_reason"] = None
        else:
            choice |= self._end(index, step.output)
        head = {**self._head, "object": self.chunk_kind}
        if self.fields.return_token_ids:
            choice["token_ids"] = list(step.token_ids)
            if is_first:
                (head if self.top_prompt_ids else choice)["prompt_token_ids"] = list(self.prompts[index // self.n])
        yield event({**head, "choices": [choice], **self._chunk_usage})

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        if self._include_usage:
            head = {**self._head, "object": self.chunk_kind}
            yield event({**head, "choices": [], "usage": usage_of(outputs, self.n)})

    def _end(self, index: int, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        reason = self.finish_reason(index, completion)
        end: dict[str, Any] = {"finish_reason": reason, "stop_reason": completion.stop_reason}
        if self.fields.return_timing and self._arrival.tokenized_s is not None:
            end["timing"] = timing(output.metrics, self._arrival.tokenized_s - self._arrival.arrival_s)
        return end


def check_choice_fields(fields: ChoiceFields) -> None:
    """What both endpoints refuse. Raises ApiError."""
    parse_salt(fields.cache_salt)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    if fields.stream_options is not None and fields.stream_options.continuous_usage_stats:
        raise unsupported("stream_options.continuous_usage_stats", "usage comes in the last chunk only")
    if fields.prompt_logprobs is not None and fields.stream:
        raise unsupported("prompt_logprobs", "the prompt's log-probabilities do not come in a stream: leave stream out")
