"""`LLM`: generate, chat and stream in one process. Drives an engine; decides nothing about scheduling or models."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from anaphora.api.choices import Choices
from anaphora.api.embedding import EmbeddingOutput
from anaphora.api.interrupts import held_interrupts
from anaphora.api.prompts import (
    Prompt,
    conversation_list,
    is_conversation,
    per_request,
    prompt_list,
)
from anaphora.config import EngineConfig
from anaphora.engine.adapters import AdapterInfo
from anaphora.engine.chat_template import Message, render_chat
from anaphora.engine.engine import Engine
from anaphora.engine.image_parts import chat_prompt, without_images
from anaphora.engine.multimodal import PreparedPrompt, text_of
from anaphora.engine.outputs import EngineStats, RequestOutput, StepOutput
from anaphora.engine.protocols import Tokenizer
from anaphora.engine.ttft import TtftParts
from anaphora.errors import AnaphoraError, ConfigError, UnknownRequestError
from anaphora.pooling_params import PoolingParams
from anaphora.salt_regions import CacheSalt
from anaphora.sampling_params import SamplingParams, embedding_params

_Add = Callable[..., None]
"""`LLM._add`, or `_add_chat` with its options bound."""


class LLM:
    """A model with a prefix cache.

        llm = LLM("smollm2-135m", block_size=16, seed=0)
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32, temperature=0.0))

    model and options: the fields of EngineConfig. Raises ConfigError and ModelError.

    A request that is wrong raises, and then nothing runs. A request that fails while it runs (non-finite output, an
    exception in the model) gives an output with the finish reason `error` and the cause in `.error`; others go on.
    """

    engine: Engine
    """The step engine below, for those who drive it themselves: not while a call of this class runs."""

    def __init__(self, model: Any, **options: Any) -> None:
        known = [field.name for field in dataclasses.fields(EngineConfig)]
        for name in options:
            if name not in known:
                similar = difflib.get_close_matches(name, known, n=1)
                hint = f": did you mean {similar[0]}?" if similar else f"; options are {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}{hint}")
        config = EngineConfig(model=model, **options)
        from anaphora.api.build import build_engine  # brings torch: not before the options are right

        self._begin(build_engine(config))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM over an engine that is built already."""
        llm = cls.__new__(cls)
        llm._begin(engine)
        return llm

    def _begin(self, engine: Engine) -> None:
        self.engine = engine
        self._num_requests = 0
        self._receivers: dict[str, Callable[[StepOutput], None]] = {}  # by live request

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: CacheSalt | Sequence[CacheSalt | None] | None = None,
        priority: int | Sequence[int] = 0,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; the outputs in the order of the prompts.

        prompts: text or token ids, or a list of those. adapter: name of a LoRA adapter; see load_adapter.
        sampling_params, cache_salt, priority, adapter: one for all, or a list of one for each prompt. All are checked
        before the first one runs. Raises RequestError, AdapterError; on that, and on KeyboardInterrupt, nothing of this
        call is left in the engine.
        """
        todo = prompt_list(prompts)
        params = per_request("sampling_params", _or_default(sampling_params), len(todo))
        salts = per_request("cache_salt", cache_salt, len(todo))
        priorities = per_request("priority", priority, len(todo))
        adapters = per_request("adapter", adapter, len(todo))
        return self._run(list(zip(todo, params, salts, priorities, adapters, strict=True)), self._add)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: CacheSalt | Sequence[CacheSalt | None] | None = None,
        priority: int | Sequence[int] = 0,
        adapter: str | Sequence[str | None] | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """As generate, for one conversation or several, rendered by the model's chat template.

        messages: a list of {"role": ..., "content": ...}, or a list of such lists; where the model reads images, a
        content may be a list of parts with images among them (docs/multimodal.md). tools: as the template wants them.
        """
        todo = conversation_list(messages)
        params = per_request("sampling_params", _or_default(sampling_params), len(todo))
        salts = per_request("cache_salt", cache_salt, len(todo))
        priorities = per_request("priority", priority, len(todo))
        adapters = per_request("adapter", adapter, len(todo))
        add = partial(self._add_chat, tools=tools, add_generation_prompt=add_generation_prompt)
        return self._run(list(zip(todo, params, salts, priorities, adapters, strict=True)), add)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "last",
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[EmbeddingOutput]:
        """Embeddings of one prompt or several, in their order, out of the model's final hidden states.

        pooling, normalize, dimensions: see PoolingParams. The rest is as in generate.
        """
        params = embedding_params(PoolingParams(pooling, normalize, dimensions))
        outputs = self.generate(prompts, params, cache_salt=cache_salt, priority=priority, adapter=adapter)
        return [EmbeddingOutput.of(output, pooling) for output in outputs]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: CacheSalt | None = None,
        priority: int = 0,
        adapter: str | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Generator[StepOutput, None, None]:
        """Generate for one prompt or conversation, token by token. The last StepOutput holds the whole, in `output`.

        With n > 1, `index` says which sequence gained something. The request begins when the first StepOutput is asked
        for; closing the generator early aborts it.
        """
        received: deque[StepOutput] = deque()
        params = SamplingParams() if sampling_params is None else sampling_params
        request_ids: list[str] = []
        add: _Add = self._add
        if is_conversation(prompt):
            add = partial(self._add_chat, tools=tools, add_generation_prompt=add_generation_prompt)
        try:
            with held_interrupts():
                add(prompt, params, cache_salt, priority, adapter, receive=received.append, request_ids=request_ids)
            while received or not self._receivers.keys().isdisjoint(request_ids):
                while not received:
                    self._step()
                yield received.popleft()
        finally:
            self._close(request_ids)

    def load_adapter(self, name: str, folder: str | os.PathLike[str], *, replace: bool = False) -> AdapterInfo:
        """From now on requests may name the LoRA adapter in this folder, as PEFT writes it.

        replace: under a name that is in use; streams that run with it end as they began. Raises AdapterError,
        InvalidParameterError; then nothing has changed.
        """
        return self.engine.load_adapter(name, folder, replace=replace)

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Forget a name; streams that run with it go on. Raises UnknownAdapterError."""
        return self.engine.unload_adapter(name)

    def forget(
        self, *, salt: CacheSalt | None = None, adapter: str | None = None, prefix: str | Sequence[int] | None = None
    ) -> int | None:
        """No later request finds what is cached of one salt, one adapter, or one prefix; see Engine.forget.

        Returns how many tokens of the prefix count: those of its full blocks. Raises RequestError.
        """
        return self.engine.forget(salt=salt, adapter=adapter, prefix=prefix)

    def update_weights(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, abort_running: bool = False
    ) -> bytes:
        """Replace weights of the live model, all or nothing; returns the new root. Nothing cached before is hit after.

        tensors: a state dict or any part of it. abort_running: end open streams with an error; else they are in the
        way. Raises WeightsError.
        """
        return self.engine.update_weights(tensors, abort_running=abort_running)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget everything cached. False, and no effect, while requests hold blocks, unless preempted first."""
        return self.engine.reset_prefix_cache(preempt_running)

    def stats(self) -> EngineStats:
        """Counters, gauges and times as plain data."""
        return self.engine.stats()

    # -- the requests of this object in the engine ---------------------------------------------------------------------

    def _run(self, todo: Sequence[tuple[Any, ...]], add: _Add) -> list[RequestOutput]:
        """todo: the positional arguments of `add` for each prompt."""
        outputs: dict[int, RequestOutput] = {}

        def receive(index: int, step: StepOutput) -> None:
            if step.output is not None:
                outputs[index] = step.output

        request_ids: list[str] = []
        try:
            for index, arguments in enumerate(todo):
                try:
                    with held_interrupts():
                        add(*arguments, receive=partial(receive, index), request_ids=request_ids)
                except AnaphoraError as error:
                    if len(todo) > 1:
                        error.add_note(f"in prompt {index} of {len(todo)}")
                    raise
            while len(outputs) < len(todo):
                self._step()
        finally:
            self._close(request_ids)
        return [outputs[index] for index in range(len(todo))]

    def _add_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        cache_salt: CacheSalt | None,
        priority: int,
        adapter: str | None,
        *,
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        receive: Callable[[StepOutput], None],
        request_ids: list[str],
    ) -> None:
        arrival_s = self.engine.clock()  # rendering is part of the time to the first token
        render = partial(render_chat, self.tokenizer, tools=tools, add_generation_prompt=add_generation_prompt)
        prompt: Prompt | PreparedPrompt
        if self.engine.image_token is None:
            prompt = render(without_images(messages))
        else:
            prompt = chat_prompt(self.engine, messages, render)
        self._add(
            prompt,
            params,
            cache_salt,
            priority,
            adapter,
            receive=receive,
            request_ids=request_ids,
            arrival_s=arrival_s,
            add_special_tokens=False,
        )

    def _add(
        self,
        prompt: Prompt | PreparedPrompt,
        params: SamplingParams,
        cache_salt: CacheSalt | None,
        priority: int,
        adapter: str | None,
        *,
        receive: Callable[[StepOutput], None],
        request_ids: list[str],
        arrival_s: float | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        """Queue the n requests of one prompt. The ids of those that got in are in request_ids afterwards."""
        arrival_s = self.engine.clock() if arrival_s is None else arrival_s
        choices = (
            params.choices() if isinstance(params, SamplingParams) else [params]
        )  # anything else is refused by add_request
        gathered = Choices(len(choices), text_of(prompt))

        def receive_choice(index: int, step: StepOutput) -> None:
            receive(gathered.add(index, step))

        if len(choices) > 1:  # text becomes tokens once
            prompt = self.engine.encode(prompt, add_special_tokens=add_special_tokens)
        before = TtftParts(tokenize_s=self.engine.clock() - arrival_s)
        for index, choice in enumerate(choices):
            request_id = f"llm-{self._num_requests}"
            self._num_requests += 1
            with held_interrupts():
                self.engine.add_request(
                    request_id,
                    prompt,
                    choice,
                    cache_salt=cache_salt,
                    priority=priority,
                    arrival_s=arrival_s,
                    before=before,
                    add_special_tokens=add_special_tokens,
                    adapter=adapter,
                )
                self._receivers[request_id] = partial(receive_choice, index)
                request_ids.append(request_id)

    def _step(self) -> None:
        """One step of the engine, for every open call of this object: streams that wait, and a generate among them."""
        if self.engine.num_unfinished > len(self._receivers):
            raise AnaphoraError(
                "llm.engine has requests that were added to it directly: step it until they have finished"
            )
        if self.engine.num_unfinished < len(self._receivers):
            raise AnaphoraError("a request of this LLM was ended through llm.engine: drive it from one place only")
        with held_interrupts():
            for output in self.engine.step():
                self._receivers[output.request_id](output)
                if output.finished:
                    del self._receivers[output.request_id]

    def _close(self, request_ids: Iterable[str]) -> None:
        """Leave nothing of these requests behind; those that have finished left nothing."""
        with held_interrupts():
            for request_id in request_ids:
                if self._receivers.pop(request_id, None) is not None:
                    with contextlib.suppress(UnknownRequestError):  # it was ended through llm.engine
                        self.engine.abort(request_id)


def _or_default(params: SamplingParams | Sequence[SamplingParams] | None) -> SamplingParams | Sequence[SamplingParams]:
    return SamplingParams() if params is None else params
