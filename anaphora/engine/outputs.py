"""What the engine gives back: plain, frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.core.plan import Embedding
from anaphora.core.stats import Counters, Gauges, GroupGauges
from anaphora.core.what_if import WhatIfPoint
from anaphora.engine.ttft import TtftParts

FinishReason = str
"""`stop` (end token, stop token or stop string), `length` (max_tokens, context limit or pool limit),
`abort` (cancelled), `error` (the step failed)."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position: raw log-probability (natural log), rank (1 = likeliest), its text if known."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, Logprob] | None]
"""One entry for each prompt token, as in RequestOutput."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where the time of one request went, in seconds by the engine's clock.

    arrival_s: when it arrived: add_request, or before it where the caller says so.
    e2e_s: from the arrival to the end.
    ttft_s: from the arrival to the first token; tokenising, hashing and look-up are inside. None if there is none.
    ttft_parts: what it was spent on; they add up to it.
    num_preemptions: how often the request was preempted.
    num_computed_prompt_tokens: prompt tokens computed until the first token = prompt - cached,
        and more if it was preempted before its first token.
    """

    arrival_s: float
    e2e_s: float
    ttft_s: float | None = None
    ttft_parts: TtftParts | None = None
    num_preemptions: int = 0
    num_computed_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence, whole.

    logprobs: one dict a token, token id -> Logprob: the chosen token first, then the likeliest; None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request that has ended. `num_cached_tokens` is the hit at first admission and never changes after.

    With n > 1 (`api.LLM`) there are n outputs; hit and time to the first token are those of the first one, as
    the others find what it computes; e2e_s is the last one's, and preemptions and computed tokens are summed.

    prompt_logprobs: as CompletionOutput.logprobs, one entry for each prompt token; the first is None, as nothing
        precedes it. Shorter than the prompt if the request ended (abort, error) before all was computed.
    embedding: of the prompt, if one was asked for and the request did not end before all was computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: Embedding | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one request gained in one step; small, however long the output is.

    text: new text, to be appended; may be empty while a character or a possible stop string is unfinished, and may
        run behind token_ids for that reason. token_ids: the new token, or none if the request ended without one.
    logprobs: one dict a new token, as in CompletionOutput; None unless asked for.
    prompt_logprobs: as in RequestOutput, in the first StepOutput only.
    ttft_parts: as in RequestMetrics, with the first token only.
    output: the whole request, in its last StepOutput only; None before.
    index: which of n sequences gained it.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    output: RequestOutput | None = None
    prompt_logprobs: PromptLogprobs | None = None
    ttft_parts: TtftParts | None = None
    index: int = 0

    @property
    def finished(self) -> bool:
        return self.output is not None


@dataclass(slots=True)
class EngineTimes:
    """Seconds since the engine began, by its clock, where they were spent. `stats()` gives copies.

    add_s: checking, tokenising and hashing new requests. schedule_s: look-up and allocation among it. execute_s: the
    executor's whole call; compute_s (forward pass) and sample_s are its own account of it. update_s: committing.
    output_s: detokenising, stop strings and outputs.
    """

    add_s: float = 0.0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    compute_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0
    output_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The scheduler's counters and gauges, where the time went, what each group of the cache holds, and what other
    pools would find (core.what_if).
    """

    counters: Counters
    gauges: Gauges
    times: EngineTimes
    groups: tuple[GroupGauges, ...] = ()
    what_if: tuple[WhatIfPoint, ...] = ()
