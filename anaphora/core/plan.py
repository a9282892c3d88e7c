"""The only things that cross from the control plane to an executor and back: one plan down, one result up.

Frozen, plain, printable. An executor is anything with `execute(plan) -> StepResult`: torch, a simulator, a test.
A plan says everything an executor needs since the plan before it, so a list of plans is a recording of a run.

    positions of one scheduled request       0 ........ start ............ start + len(token_ids)
                                             [ in the pool )[ scheduled now )  -> the next token, if sample
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from anaphora.core.ids import BlockId, RequestId, StateSlot, TokenId
from anaphora.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FeatureSpan:
    """Positions [start, start + length) of a request, whose input is given as rows instead of looked up by token.

    digest: what the executor knows the rows by, in hex. has_tokens: whether the tokens there mean something (an image's
    placeholders), or only fill the place (rows that the caller gave).
    """

    start: int
    length: int
    digest: str
    has_tokens: bool = True

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that the executor meets for the first time, or again after preemption.

    token_ids: every token known now (prompt, then outputs made before a preemption).
    seed: resolved per request; the choice at a position depends on it and on the position only.
    end_token_ids: end the request; not to be chosen as one of the first `sampling.min_tokens` outputs.
    adapter: digest of the LoRA adapter that every token of it is computed with, None for the model itself.
    features: what stands in the prompt instead of token embeddings, ascending and apart.
    """

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    end_token_ids: frozenset[int] = frozenset()
    adapter: str | None = None
    features: tuple[FeatureSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What one request computes in this step.

    start: position of the first scheduled token; K/V of positions [0, start) are in the pool, or
        (blocks that a request earlier in this plan writes) are in it once this step has written.
    token_ids: the scheduled tokens, positions [start, start + len(token_ids)). Never empty.
    new_block_ids: for each group of the cache's layout, appended to the request's block table since the plan before
        this one; with an admission in the same plan, the whole table. It covers every scheduled position. The null
        block stands where no scheduled token looks.
    sample: whether the last scheduled token is the last known one, so that the next token is sampled.
    load_state: with an admission and start > 0, the checkpoint that the recurrent state of position start is copied
        from, before anything else happens in this step.
    save_state: the checkpoint that the recurrent state after the last scheduled token is copied to, after all else.
    """

    request_id: RequestId
    start: int
    token_ids: tuple[TokenId, ...]
    new_block_ids: tuple[tuple[BlockId, ...], ...]
    sample: bool
    load_state: StateSlot | None = None
    save_state: StateSlot | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: one forward pass over the scheduled tokens of every scheduled request, in this order.

    released: requests to forget before anything else (finished, aborted, failed or preempted since
        the plan before this one, or told of by a plan that failed). An id may be released and admitted again in one
        plan, and may be one that the executor has forgotten already.
    """

    step: int
    released: tuple[RequestId, ...]
    admitted: tuple[Admission, ...]
    scheduled: tuple[ScheduledRequest, ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen at one position, or given there (in a prompt).

    logprob: raw log-probability of the chosen token (natural log), None unless asked for.
    rank: 1 for the likeliest token; None unless asked for.
    top_logprobs: (token id, logprob) of the likeliest tokens, likeliest first; as many as asked for.
    """

    token_id: TokenId
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: tuple[tuple[TokenId, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of numbers that stand for a prompt: one, or one for each of its tokens.

    values: rows x size, row by row, each number a little-endian float32. size: numbers in a row.
    """

    values: bytes
    size: int

    @property
    def num_rows(self) -> int:
        return len(self.values) // (4 * self.size)

    def rows(self) -> list[list[float]]:
        numbers = array("f", self.values)
        if sys.byteorder == "big":
            numbers.byteswap()
        flat = numbers.tolist()
        return [flat[begin : begin + self.size] for begin in range(0, len(flat), self.size)]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    sampled: one entry for each scheduled request with `sample`, unless it failed or is in unsampled.
    failed: request id -> what went wrong (non-finite output). K/V that these requests wrote in this
        step are worthless; the executor has wiped them.
    unsampled: request id -> why no next token could be chosen, although its K/V are right. It ends with this error.
    prompt_logprobs: for scheduled requests that want them, the prompt tokens at positions start + 1 and on that this
        step's positions precede: up to and including start + len(token_ids), as far as the prompt goes.
    embeddings: for scheduled requests that want one, in the step that computes the last token of the prompt.
    compute_s, sample_s: seconds in the forward pass and in choosing tokens.
    """

    sampled: Mapping[RequestId, SampledToken]
    failed: Mapping[RequestId, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[RequestId, tuple[SampledToken, ...]] = field(default_factory=dict)
    unsampled: Mapping[RequestId, str] = field(default_factory=dict)
    embeddings: Mapping[RequestId, Embedding] = field(default_factory=dict)
    compute_s: float = 0.0
    sample_s: float = 0.0
