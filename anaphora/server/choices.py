"""What completions and chat completions share: the choices of each prompt, usage, chunks. Knows no text format."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from anaphora.engine.multimodal import TokenPrompt
from anaphora.engine.outputs import CompletionOutput, PromptLogprobs, RequestOutput, StepOutput
from anaphora.engine.request_group import NewRequest
from anaphora.sampling_params import SamplingParams
from anaphora.server.arrival import Arrival
from anaphora.server.connection import event
from anaphora.server.errors import invalid
from anaphora.server.fields import ChoiceFields
from anaphora.server.generation import Job
from anaphora.server.sampling import parse_salt
from anaphora.server.service import Service
from anaphora.server.shapes import prompt_logprobs, timings, usage_of


class ChoicesJob(Job):
    """Several prompts with n choices each; choice index = prompt index * n + i.

    params.n choices of each prompt are sampled. n: how many of them are given, the likeliest ones.
    """

    id_prefix: str
    kind: str  # `object` of the reply
    chunk_kind: str  # `object` of a chunk
    top_prompt_ids: bool  # where the prompt's ids go: into the reply, or into each choice

    def __init__(
        self,
        service: Service,
        fields: ChoiceFields,
        arrival: Arrival,
        prompts: Sequence[TokenPrompt],
        params: SamplingParams,
        *,
        n: int,
    ) -> None:
        self.fields = fields
        self.prompts = prompts
        self.n = n
        self.stream = bool(fields.stream)
        salt = service.domains.salt(arrival.caller, parse_salt(fields.cache_salt))
        self.requests = [
            NewRequest(
                prompt,
                choice,
                cache_salt=salt,
                priority=fields.priority or 0,
                tenant=arrival.caller.tenant,
                adapter=service.adapter_of(fields),
            )
            for prompt in prompts
            for choice in params.choices()
        ]
        self._num_sampled = params.n
        self._scores_prompts = params.prompt_logprobs is not None
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name_of(fields),
        }
        options = fields.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._counts_in_chunks = bool(options and options.continuous_usage_stats)
        self._num_new_tokens = 0
        self._begun: set[int] = set()
        self._scores: dict[int, PromptLogprobs] = {}  # by prompt
        self._held: dict[int, list[tuple[int, StepOutput]]] = {}  # by prompt: what came before its scores

    # -- the text format of the endpoint -------------------------------------------------------------------------------

    @abstractmethod
    def whole(self, index: int, output: RequestOutput, scores: PromptLogprobs) -> dict[str, Any]:
        """What a choice of the reply says besides index and reasons. scores: of its prompt; empty if not wanted."""

    @abstractmethod
    def delta(self, index: int, step: StepOutput, is_first: bool, scores: PromptLogprobs) -> dict[str, Any]:
        """What a chunk's choice says besides index and reasons. scores: as above."""

    def finish_reason(self, index: int, completion: CompletionOutput) -> str | None:
        return completion.finish_reason

    # -- Job -----------------------------------------------------------------------------------------------------------

    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for begin in range(0, len(outputs), self._num_sampled):
            sampled = outputs[begin : begin + self._num_sampled]
            scores = sampled[0].prompt_logprobs or []  # the first choice scores the prompt for all
            if self.n < self._num_sampled:
                sampled = sorted(sampled, key=_likelihood, reverse=True)[: self.n]
            for output in sampled:
                index = len(choices)
                choice = {"index": index, **self.whole(index, output, scores), **self._end(index, output)}
                if self.fields.return_token_ids:
                    choice["token_ids"] = list(output.outputs[0].token_ids)
                choices.append(choice | ({} if self.top_prompt_ids else self._of_prompt(index, scores)))
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": usage_of(outputs, self._num_sampled),
            **self._timings(outputs),
            **(self._of_prompt(0, outputs[0].prompt_logprobs or []) if self.top_prompt_ids else {}),
        }

    def step_events(self, index: int, step: StepOutput) -> Iterable[bytes]:
        prompt = index // self.n
        if step.prompt_logprobs is not None:
            self._scores[prompt] = step.prompt_logprobs
        if self._scores_prompts and prompt not in self._scores:  # another choice was faster than the one that scores
            self._held.setdefault(prompt, []).append((index, step))
            return
        for entry in (*self._held.pop(prompt, ()), (index, step)):
            yield from self._chunk(*entry)

    def _chunk(self, index: int, step: StepOutput) -> Iterable[bytes]:
        is_first = index not in self._begun
        self._begun.add(index)
        self._num_new_tokens += len(step.token_ids)
        if not (is_first or step.text or step.finished or step.logprobs or self.fields.return_token_ids):
            return  # the token's text is not certain yet
        scores = self._scores.get(index // self.n, [])
        choice = {"index": index, **self.delta(index, step, is_first, scores)}
        choice |= {"finish_reason": None} if step.output is None else self._end(index, step.output)
        if self.fields.return_token_ids:
            choice["token_ids"] = list(step.token_ids)
        head = {**self._head, "object": self.chunk_kind}
        if is_first:
            (head if self.top_prompt_ids else choice).update(self._of_prompt(index, scores))
        yield event({**head, "choices": [choice], **self._usage_so_far()})

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        said = self._timings(outputs)
        if self._include_usage:
            said["usage"] = usage_of(outputs, self._num_sampled)
        if said:
            yield event({**self._head, "object": self.chunk_kind, "choices": [], **said})

    def _usage_so_far(self) -> dict[str, Any]:
        """What each chunk says of usage: null, or the counts without the hit, which is told at the end."""
        if not self._include_usage:
            return {}
        if not self._counts_in_chunks:
            return {"usage": None}
        num_prompt, num_new = sum(map(len, self.prompts)), self._num_new_tokens
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        return {"usage": counts}

    def _timings(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {"timings": timings(outputs)} if self.fields.return_timings else {}

    def _of_prompt(self, index: int, scores: PromptLogprobs) -> dict[str, Any]:
        """What is said once of a choice's prompt, where it is wanted."""
        said: dict[str, Any] = {}
        if self.fields.return_token_ids:
            said["prompt_token_ids"] = list(self.prompts[index // self.n])
        if self.fields.prompt_logprobs is not None:
            said["prompt_logprobs"] = prompt_logprobs(scores, self.fields.prompt_logprobs)
        return said

    def _end(self, index: int, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        return {"finish_reason": self.finish_reason(index, completion), "stop_reason": completion.stop_reason}


def _likelihood(output: RequestOutput) -> float:
    """Mean log-probability of a choice's tokens."""
    entries = output.outputs[0].logprobs or []
    return sum(next(iter(entry.values())).logprob for entry in entries) / len(entries)


def check_choice_fields(fields: ChoiceFields) -> None:
    """What both endpoints refuse. Raises ApiError."""
    parse_salt(fields.cache_salt)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    options = fields.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise invalid("stream_options.continuous_usage_stats", "continuous_usage_stats needs include_usage: true")
