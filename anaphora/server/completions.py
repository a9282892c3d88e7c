"""`POST /v1/completions`: text or token ids in, one or several of them; text out."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from anaphora.engine.multimodal import TokenPrompt
from anaphora.engine.outputs import Logprob, PromptLogprobs, RequestOutput, StepOutput
from anaphora.sampling_params import SamplingParams
from anaphora.server.arrival import Arrival
from anaphora.server.choices import ChoicesJob, check_choice_fields
from anaphora.server.config import ServerConfig
from anaphora.server.errors import invalid, unsupported
from anaphora.server.fields import CompletionFields
from anaphora.server.sampling import ENGINE_NAMES, check_n, parse_salt, sampling_params
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
        prompts: Sequence[TokenPrompt],
        echoes: Sequence[str],
        first_tokens: Sequence[str],
        params: SamplingParams,
        *,
        n: int,
    ) -> None:
        super().__init__(service, fields, arrival, prompts, params, n=n)
        self._echoes = echoes
        self._first_tokens = first_tokens
        self._num_logprobs = fields.logprobs
        self._as_ids = bool(fields.return_tokens_as_token_ids)
        self._offsets: dict[int, int] = {}

    def whole(self, index: int, output: RequestOutput, scores: PromptLogprobs) -> dict[str, Any]:
        completion = output.outputs[0]
        text, logprobs = self._begin(index, completion.logprobs or [], scores)
        return {"text": text + completion.text, "logprobs": logprobs}

    def delta(self, index: int, step: StepOutput, is_first: bool, scores: PromptLogprobs) -> dict[str, Any]:
        entries = step.logprobs or ()
        if is_first:
            text, logprobs = self._begin(index, entries, scores)
        else:
            text, logprobs = "", self._logprobs(entries, offset=self._offsets.get(index, 0))
        if logprobs is not None and logprobs["tokens"]:
            self._offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        return {"text": text + step.text, "logprobs": logprobs}

    def _begin(
        self, index: int, entries: Sequence[Mapping[int, Logprob]], scores: PromptLogprobs
    ) -> tuple[str, dict[str, Any] | None]:
        """The echo, and the log-probabilities of the first tokens, behind the echoed ones' if those are wanted."""
        prompt = index // self.n
        echo = self._echoes[prompt]
        if not self._first_tokens:
            return echo, self._logprobs(entries, offset=len(echo))
        scored = [entry for entry in scores if entry is not None]
        return echo, self._logprobs([*scored, *entries], first_token=self._first_tokens[prompt])

    def _logprobs(
        self, entries: Sequence[Mapping[int, Logprob]], *, offset: int = 0, first_token: str | None = None
    ) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        return completion_logprobs(
            entries, self._num_logprobs, as_ids=self._as_ids, offset=offset, first_token=first_token
        )


async def prepare_completion(service: Service, body: bytes, arrival: Arrival) -> CompletionJob:
    """Raises ApiError."""
    fields = await service.parse(CompletionFields, body, arrival)
    check_choice_fields(fields)
    n = check_n(fields.n, service.config)
    num_sampled = _num_sampled(fields, n, service.config)
    if fields.suffix:
        raise unsupported("suffix", "this server does not insert before a suffix: leave it out")
    echoes_logprobs = bool(fields.echo) and fields.logprobs is not None
    given = prompt_list(fields.prompt, service.config) if fields.prompt_embeds is None else []
    files = [] if fields.prompt_embeds is None else embeds_list(fields, service.config)
    params = sampling_params(
        fields,
        service.config,
        n=num_sampled,
        response_format=fields.response_format,
        max_tokens=DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
        logprobs=0 if fields.logprobs is None and num_sampled > n else fields.logprobs,  # to choose the likeliest
        prompt_logprobs=max(
            (k for k in (fields.prompt_logprobs, fields.logprobs if echoes_logprobs else None) if k is not None),
            default=None,
        ),
    )

    def work() -> tuple[list[TokenPrompt], list[str], list[str]]:
        service.engine.engine.check_grammar(params)
        special = fields.add_special_tokens is not False
        domain = service.memo_domain(arrival.caller, parse_salt(fields.cache_salt))
        engine = service.engine.engine
        ids: list[TokenPrompt] = [engine.read_prompt({"prompt_embeds": data}) for data in files]
        ids += [service.text.prompt_ids(one, add_special_tokens=special, memo_domain=domain) for one in given]
        if not fields.echo:
            return ids, [""] * len(ids), []
        hide = fields.skip_special_tokens is not False
        echoes = [
            prompt if isinstance(prompt, str) else service.text.decode(prompt, skip_special_tokens=hide)
            for prompt in given
        ]
        as_ids = fields.return_tokens_as_token_ids
        firsts = [f"token_id:{next(iter(one))}" if as_ids else service.text.decode(list(one)[:1]) for one in ids]
        return ids, echoes, firsts if echoes_logprobs else []

    field = "prompt" if fields.prompt_embeds is None else "prompt_embeds"
    prompts, echoes, first_tokens = await service.on_worker(field, arrival.tokenizing(work), ENGINE_NAMES)
    return CompletionJob(service, fields, arrival, prompts, echoes, first_tokens, params, n=n)


def _num_sampled(fields: CompletionFields, n: int, config: ServerConfig) -> int:
    """How many choices are sampled, of which the n likeliest are given. Raises ApiError."""
    best_of = n if fields.best_of is None else fields.best_of
    if not n <= best_of <= config.max_n:
        raise invalid("best_of", f"best_of must be from n ({n}) to {config.max_n}, got {best_of}")
    if best_of > n and fields.stream:
        raise unsupported("best_of", "which choices are the best is known at the end only: leave best_of or stream out")
    return best_of


def prompt_list(prompt: Any, config: ServerConfig, field: str = "prompt") -> list[str | list[int]]:
    """Text, token ids, or a list of those, as a list. Whether ids are integers is checked later. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid(field, f"{field} must be a string, a list of token ids, or a non-empty list of those")
    if not isinstance(prompt[0], str | list):
        return [prompt]
    if len(prompt) > config.max_prompts:
        raise invalid(field, f"{field} holds {len(prompt)} prompts, at most {config.max_prompts} are allowed")
    for index, one in enumerate(prompt):
        if not isinstance(one, str | list):
            raise invalid(field, f"{field} {index} of the list must be a string or a list of token ids")
    return prompt


def embeds_list(fields: CompletionFields, config: ServerConfig) -> list[bytes]:
    """`prompt_embeds`: a safetensors file in base64, or a list of those. Raises ApiError."""
    if fields.prompt is not None:
        raise invalid("prompt_embeds", "give prompt or prompt_embeds: tokens among rows stand in the same file")
    if fields.echo:
        raise unsupported("echo", "rows of embeddings are no text that could be echoed: leave echo out")
    given = fields.prompt_embeds if isinstance(fields.prompt_embeds, list) else [fields.prompt_embeds]
    if not 0 < len(given) <= config.max_prompts:
        raise invalid(
            "prompt_embeds", f"prompt_embeds holds {len(given)} prompts: 1 to {config.max_prompts} are allowed"
        )
    try:
        return [base64.b64decode(data, validate=True) for data in given]
    except (TypeError, ValueError):
        raise invalid(
            "prompt_embeds", "prompt_embeds must be a safetensors file in base64, or a list of those"
        ) from None
