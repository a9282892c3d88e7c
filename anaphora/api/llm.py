"""`LLM`: generate, chat and stream in one process. Drives an engine; decides nothing about scheduling or models."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from anaphora.api.embedding import EmbeddingOutput
from anaphora.api.open_requests import OnOutput, OpenRequests, Render, Wanted, wanted_of
from anaphora.api.prompts import Prompt, conversation_list, is_conversation, prompt_list
from anaphora.config import EngineConfig
from anaphora.engine.adapters import AdapterInfo
from anaphora.engine.chat_template import Message, render_chat
from anaphora.engine.engine import Engine
from anaphora.engine.image_parts import chat_prompt, without_images
from anaphora.engine.multimodal import PreparedPrompt
from anaphora.engine.outputs import EngineStats, RequestOutput, StepOutput
from anaphora.engine.protocols import Tokenizer
from anaphora.errors import ConfigError
from anaphora.pooling_params import PoolingParams
from anaphora.salt_regions import CacheSalt
from anaphora.sampling_params import SamplingParams, embedding_params


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
        self._open = OpenRequests(engine)

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
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; the outputs in the order of the prompts.

        prompts: text or token ids, or a list of those. adapter: name of a LoRA adapter; see load_adapter.
        sampling_params, cache_salt, priority, adapter: one for all, or a list of one for each prompt. All are checked
        before the first one runs. on_output: is told of each prompt as it ends, by its index, with its output. Raises
        RequestError, AdapterError; on that, and on KeyboardInterrupt, nothing of this call is left in the engine.
        """
        todo = wanted_of(prompt_list(prompts), sampling_params, cache_salt, priority, adapter)
        return self._open.run(todo, None, on_output)

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
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """As generate, for one conversation or several, rendered by the model's chat template.

        messages: a list of {"role": ..., "content": ...}, or a list of such lists; where the model reads images, a
        content may be a list of parts with images among them (docs/multimodal.md). tools: as the template wants them.
        """
        todo = wanted_of(conversation_list(messages), sampling_params, cache_salt, priority, adapter)
        return self._open.run(todo, self._renderer(tools, add_generation_prompt), on_output)

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
        params = SamplingParams() if sampling_params is None else sampling_params
        render = self._renderer(tools, add_generation_prompt) if is_conversation(prompt) else None
        return self._open.stream(Wanted(prompt, params, cache_salt, priority, adapter), render)

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

    def _renderer(self, tools: Sequence[Any] | None, add_generation_prompt: bool) -> Render:
        render = partial(render_chat, self.tokenizer, tools=tools, add_generation_prompt=add_generation_prompt)

        def to_prompt(messages: Sequence[Message]) -> Prompt | PreparedPrompt:
            if self.engine.image_token is None:
                return render(without_images(messages))
            return chat_prompt(self.engine, messages, render)

        return to_prompt
