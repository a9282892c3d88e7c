"""`POST /v1/chat/completions`: a conversation in, rendered by the model's chat template; messages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from anaphora.engine.multimodal import PreparedPrompt, TokenPrompt
from anaphora.engine.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput, StepOutput
from anaphora.sampling_params import SamplingParams
from anaphora.server.arrival import Arrival
from anaphora.server.choices import ChoicesJob, check_choice_fields
from anaphora.server.errors import invalid, unsupported
from anaphora.server.fields import ChatFields
from anaphora.server.sampling import ENGINE_NAMES, check_n, parse_salt, sampling_params
from anaphora.server.service import Service
from anaphora.server.shapes import chat_logprobs
from anaphora.server.tool_calls import ToolCallReader

_NAMES = MappingProxyType({**ENGINE_NAMES, "logprobs": "top_logprobs"})


class ChatJob(ChoicesJob):
    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    top_prompt_ids = True
    prompt_field = "messages"
    names = _NAMES

    def __init__(
        self, service: Service, fields: ChatFields, arrival: Arrival, prompt: TokenPrompt, params: SamplingParams
    ) -> None:
        super().__init__(service, fields, arrival, [prompt], params, n=params.n)
        self._num_logprobs = params.logprobs
        self._as_ids = bool(fields.return_tokens_as_token_ids)
        self._reads_calls = bool(fields.tools) and fields.tool_choice != "none" and service.text.writes_tool_calls
        self._readers: dict[int, ToolCallReader] = {}

    def whole(self, index: int, output: RequestOutput, scores: PromptLogprobs) -> dict[str, Any]:
        completion = output.outputs[0]
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self._reads_calls:
            reader = self._readers[index] = ToolCallReader()
            content, _ = reader.add(completion.text, is_last=True)
            message["content"] = content or (None if reader.calls else "")
            if reader.calls:
                message["tool_calls"] = reader.calls
        return {"message": message, "logprobs": self._logprobs(completion.logprobs or ())}

    def delta(self, index: int, step: StepOutput, is_first: bool, scores: PromptLogprobs) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        delta["content"] = step.text
        if self._reads_calls:
            reader = self._readers.setdefault(index, ToolCallReader())
            num_before = len(reader.calls)
            delta["content"], calls = reader.add(step.text, is_last=step.finished)
            if calls:
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, num_before)]
        return {"delta": delta, "logprobs": self._logprobs(step.logprobs or ())}

    def finish_reason(self, index: int, completion: CompletionOutput) -> str | None:
        has_calls = index in self._readers and bool(self._readers[index].calls)
        return "tool_calls" if has_calls and completion.finish_reason == "stop" else completion.finish_reason

    def _logprobs(self, steps: Sequence[Mapping[int, Logprob]]) -> dict[str, Any] | None:
        return None if self._num_logprobs is None else chat_logprobs(steps, self._num_logprobs, as_ids=self._as_ids)


async def prepare_chat(service: Service, body: bytes, arrival: Arrival) -> ChatJob:
    """Raises ApiError."""
    fields = await service.parse(ChatFields, body, arrival)
    check_choice_fields(fields)
    service.check_conversation(fields)
    _check_tools(fields)
    wanted = _max_tokens(fields)
    # The values are checked before anything is rendered; the default of max_tokens is known after.
    params = sampling_params(
        fields,
        service.config,
        max_tokens=max(1, fields.min_tokens or 0) if wanted is None else wanted,
        n=check_n(fields.n, service.config),
        response_format=fields.response_format,
        logprobs=_num_logprobs(fields),
        prompt_logprobs=fields.prompt_logprobs,
        names=_NAMES,
    )

    fetched = await service.fetch_images(fields)

    def work() -> list[int] | PreparedPrompt:
        service.engine.engine.check_grammar(params)
        domain = service.memo_domain(arrival.caller, parse_salt(fields.cache_salt))
        return service.chat_prompt(fields, memo_domain=domain, fetched=fetched)[1]

    prompt = await service.on_worker("messages", arrival.tokenizing(work), _NAMES)
    if wanted is None:
        params = service.with_room(params, len(prompt))
    return ChatJob(service, fields, arrival, prompt, params)


def _max_tokens(fields: ChatFields) -> int | None:
    both = {value for value in (fields.max_tokens, fields.max_completion_tokens) if value is not None}
    if len(both) > 1:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
    return both.pop() if both else None


def _num_logprobs(fields: ChatFields) -> int | None:
    if not fields.logprobs:
        if fields.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        return None
    return fields.top_logprobs or 0


def _check_tools(fields: ChatFields) -> None:
    if fields.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "this server cannot force a tool call: use auto or none")
    if fields.tool_choice is not None and not fields.tools:
        raise invalid("tool_choice", "tool_choice needs tools")
    if fields.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "this server cannot limit how many tools a model calls")
    if fields.reasoning_effort is not None:
        raise unsupported("reasoning_effort", "set the template's own variable with chat_template_kwargs instead")
