"""The requests of one `LLM` in its engine, from the call that asks for them to its end: added, stepped, closed.

Knows an engine and how outputs find the call that waits for them; must not know models or what a chat looks like.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anaphora.api.choices import Choices
from anaphora.api.interrupts import held_interrupts
from anaphora.api.prompts import Prompt, per_request
from anaphora.engine.chat_template import Message
from anaphora.engine.engine import Engine
from anaphora.engine.multimodal import PreparedPrompt, text_of
from anaphora.engine.outputs import RequestOutput, StepOutput
from anaphora.engine.ttft import TtftParts
from anaphora.errors import AnaphoraError, UnknownRequestError
from anaphora.salt_regions import CacheSalt
from anaphora.sampling_params import SamplingParams

Render = Callable[[Sequence[Message]], Prompt | PreparedPrompt]
"""A conversation to a prompt that holds its special tokens already."""

OnOutput = Callable[[int, RequestOutput], None]
"""Is told of each prompt that has ended: its index, and its output."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call asks of one prompt, or of one conversation where the call has a `Render`."""

    prompt: Any
    params: SamplingParams
    cache_salt: CacheSalt | None
    priority: int
    adapter: str | None


def wanted_of(
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams] | None,
    cache_salt: CacheSalt | Sequence[CacheSalt | None] | None,
    priority: int | Sequence[int],
    adapter: str | Sequence[str | None] | None,
) -> list[Wanted]:
    """One for all, or a list of one for each prompt, of everything but the prompts. Raises InvalidParameterError."""
    count = len(prompts)
    each = (
        per_request("sampling_params", SamplingParams() if params is None else params, count),
        per_request("cache_salt", cache_salt, count),
        per_request("priority", priority, count),
        per_request("adapter", adapter, count),
    )
    return [Wanted(*values) for values in zip(prompts, *each, strict=True)]


class OpenRequests:
    """Drives an engine for every open call of one LLM: streams that wait, and a generate among them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_requests = 0
        self._receivers: dict[str, Callable[[StepOutput], None]] = {}  # by live request

    def run(self, todo: Sequence[Wanted], render: Render | None, on_output: OnOutput | None) -> list[RequestOutput]:
        """All of them to their ends. Whatever is raised, nothing of them is left in the engine."""
        outputs: dict[int, RequestOutput] = {}
        untold: deque[int] = deque()

        def receive(index: int, step: StepOutput) -> None:
            if step.output is not None:
                outputs[index] = step.output
                untold.append(index)

        request_ids: list[str] = []
        try:
            for index, wanted in enumerate(todo):
                try:
                    with held_interrupts():
                        self._add(wanted, render, partial(receive, index), request_ids)
                except AnaphoraError as error:
                    if len(todo) > 1:
                        error.add_note(f"in prompt {index} of {len(todo)}")
                    raise
            while len(outputs) < len(todo):
                self._step()
                while on_output is not None and untold:
                    index = untold.popleft()
                    on_output(index, outputs[index])
        finally:
            self._close(request_ids)
        return [outputs[index] for index in range(len(todo))]

    def stream(self, wanted: Wanted, render: Render | None) -> Generator[StepOutput, None, None]:
        """Step by step. It begins when the first StepOutput is asked for; closing it early aborts it."""
        received: deque[StepOutput] = deque()
        request_ids: list[str] = []
        try:
            with held_interrupts():
                self._add(wanted, render, received.append, request_ids)
            while received or not self._receivers.keys().isdisjoint(request_ids):
                while not received:
                    self._step()
                yield received.popleft()
        finally:
            self._close(request_ids)

    def _add(
        self, wanted: Wanted, render: Render | None, receive: Callable[[StepOutput], None], request_ids: list[str]
    ) -> None:
        """Queue the n requests of one prompt. The ids of those that got in are in request_ids afterwards."""
        arrival_s = self._engine.clock()  # rendering is part of the time to the first token
        prompt = wanted.prompt if render is None else render(wanted.prompt)
        params = wanted.params
        # Anything else is refused by add_request.
        choices = params.choices() if isinstance(params, SamplingParams) else [params]
        gathered = Choices(len(choices), text_of(prompt))

        def receive_choice(index: int, step: StepOutput) -> None:
            receive(gathered.add(index, step))

        if len(choices) > 1:  # text becomes tokens once
            prompt = self._engine.encode(prompt, add_special_tokens=render is None)
        before = TtftParts(tokenize_s=self._engine.clock() - arrival_s)
        for index, choice in enumerate(choices):
            request_id = f"llm-{self._num_requests}"
            self._num_requests += 1
            with held_interrupts():
                self._engine.add_request(
                    request_id,
                    prompt,
                    choice,
                    cache_salt=wanted.cache_salt,
                    priority=wanted.priority,
                    arrival_s=arrival_s,
                    before=before,
                    add_special_tokens=render is None,
                    adapter=wanted.adapter,
                )
                self._receivers[request_id] = partial(receive_choice, index)
                request_ids.append(request_id)

    def _step(self) -> None:
        """One step of the engine, for every open call."""
        if self._engine.num_unfinished > len(self._receivers):
            raise AnaphoraError(
                "llm.engine has requests that were added to it directly: step it until they have finished"
            )
        if self._engine.num_unfinished < len(self._receivers):
            raise AnaphoraError("a request of this LLM was ended through llm.engine: drive it from one place only")
        with held_interrupts():
            for output in self._engine.step():
                self._receivers[output.request_id](output)
                if output.finished:
                    del self._receivers[output.request_id]

    def _close(self, request_ids: Iterable[str]) -> None:
        """Leave nothing of these requests behind; those that have finished left nothing."""
        with held_interrupts():
            for request_id in request_ids:
                if self._receivers.pop(request_id, None) is not None:
                    with contextlib.suppress(UnknownRequestError):  # it was ended through llm.engine
                        self._engine.abort(request_id)
