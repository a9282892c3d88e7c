"""`POST /v1/completions`: text or token ids in, one or several of them; text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anaphora.engine.outputs import Logprob, RequestOutput, StepOutput
from anaphora.sampling_params import SamplingParams
from anaphora.server.choices import ChoicesJob, check_choice_fields
from anaphora.server.config import ServerConfig
from anaphora.server.errors import invalid, unsupported
from anaphora.server.fields import CompletionFields
from anaphora.server.generation import Arrival
from anaphora.server.sampling import ENGINE_NAMES, check_n, sampling_params
from anaphora.server.service import Service
from anaphora.server.shapes import completion_logprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionJob(ChoicesJob):
    """echoes: the text of each prompt, to stand before its outputs; empty strings if nothing is to.

    first_tokens: each prompt's first token as text, if the prompts' log-probabilities stand before the outputs' too.
    """

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"
    top_prompt_ids = False
    prompt_field = "prompt"
    names = ENGINE_NAMES

    def __init__(
        self,
        service: Service,
        fields: CompletionFields,
        arrival: Arrival,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
        first_tokens: Sequence[str],
        params: SamplingParams,
    ) -> None:
        super().__init__(service, fields, arrival, prompts, params)
        self._echoes = echoes
        self._first_tokens = first_tokens
        self._as_ids = bool(fields.return_tokens_as_token_ids)
        self._offsets: dict[int, int] = {}

    def whole(self, index: int, output: RequestOutput, first: RequestOutput) -> dict[str, Any]:
        completion, echo = output.outputs[0], self._echoes[index // self.n]
        steps = completion.logprobs or []
        if self._first_tokens:
            scored = [entry for entry in first.prompt_logprobs or () if entry is not None]
            shown = self._logprobs([*scored, *steps], first_token=self._first_tokens[index // self.n])
        else:
            shown = self._logprobs(steps, offset=len(echo))
        return {"text": echo + completion.text, "logprobs": shown}

    def delta(self, index: int, step: StepOutput, is_first: bool) -> dict[str, Any]:
        echo = self._echoes[index // self.n] if is_first else ""
        offset = self._offsets.get(index, len(echo))
        shown = self._logprobs(step.logprobs or (), offset=offset)
        if shown is not None:
            self._offsets[index] = offset + sum(map(len, shown["tokens"]))
        return {"text": echo + step.text, "logprobs": shown}

    def _logprobs(
        self, steps: Sequence[Mapping[int, Logprob]], *, offset: int = 0, first_token: str | None = None
    ) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        return completion_logprobs(
            steps, self.num_logprobs, as_ids=self._as_ids, offset=offset, first_token=first_token
        )


async def prepare_completion(service: Service, body: bytes, arrival: Arrival) -> CompletionJob:
    """Raises ApiError."""
    fields = await service.parse(CompletionFields, body)
    check_choice_fields(fields)
    n = check_n(fields.n, service.config)
    if fields.best_of not in (None, n):
        raise unsupported("best_of", f"best_of must equal n ({n}): this server returns every choice that it samples")
    if fields.suffix:
        raise unsupported("suffix", "this server does not insert before a suffix: leave it out")
    echoes_logprobs = bool(fields.echo) and fields.logprobs is not None
    if echoes_logprobs and fields.stream:
        raise unsupported("echo", "echo with logprobs does not come in a stream: leave one of the three out")
    given = prompt_list(fields.prompt, service.config)
    params = sampling_params(
        fields,
        service.config,
        n=n,
        response_format=fields.response_format,
        max_tokens=DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.prompt_logprobs
        if fields.prompt_logprobs is not None or not echoes_logprobs
        else fields.logprobs,
    )

    def work() -> tuple[list[list[int]], list[str], list[str]]:
        service.engine.engine.check_grammar(params)
        special = fields.add_special_tokens is not False
        ids = [service.text.prompt_ids(prompt, add_special_tokens=special) for prompt in given]
        if not fields.echo:
            return ids, [""] * len(ids), []
        hide = fields.skip_special_tokens is not False
        echoes = [
            prompt if isinstance(prompt, str) else service.text.decode(prompt, skip_special_tokens=hide)
            for prompt in given
        ]
        as_ids = fields.return_tokens_as_token_ids
        firsts = [f"token_id:{one[0]}" if as_ids else service.text.decode(one[:1]) for one in ids]
        return ids, echoes, firsts if echoes_logprobs else []

    prompts, echoes, first_tokens = await service.on_worker("prompt", work, ENGINE_NAMES)
    return CompletionJob(service, fields, arrival, prompts, echoes, first_tokens, params)


def prompt_list(prompt: Any, config: ServerConfig) -> list[str | list[int]]:
    """Text, token ids, or a list of those, as a list. Whether ids are integers is checked later. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", "prompt must be a string, a list of token ids, or a non-empty list of those")
    if not isinstance(prompt[0], str | list):
        return [prompt]
    if len(prompt) > config.max_prompts:
        raise invalid("prompt", f"prompt holds {len(prompt)} prompts, at most {config.max_prompts} are allowed")
    for index, one in enumerate(prompt):
        if not isinstance(one, str | list):
            raise invalid("prompt", f"prompt {index} of the list must be a string or a list of token ids")
    return prompt
