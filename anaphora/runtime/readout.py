"""What a step's hidden states and logits say of each request: failures, scores of a prompt, embeddings, next tokens.

Knows the final hidden states, the logits, and how each request chooses; must not know K/V, blocks, or how these were
computed. An argument `admitted` is what is kept of each scheduled request, in the plan's order; `failed` has the index
of each one whose results are worthless, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anaphora.core.ids import RequestId
from anaphora.core.plan import Embedding, SampledToken, ScheduledRequest
from anaphora.runtime.admitted_request import AdmittedRequest
from anaphora.runtime.fast_forward import Forward
from anaphora.runtime.float_bits import all_finite
from anaphora.runtime.grammar import GrammarError
from anaphora.runtime.inputs import StepInputs
from anaphora.runtime.sampler import SamplingRow, report, row_by_row, sample

# Logits of a prompt are made for so many positions at once: in float32, half a gigabyte for the largest vocabularies.
SCORED_ROWS = 256


class Readout:
    """forward: its head makes the logits of a prompt. one_by_one: each row is read as if it were alone."""

    def __init__(self, forward: Forward, vocab_size: int, *, one_by_one: bool) -> None:
        self._forward = forward
        self._vocab_size = vocab_size
        self._choose = row_by_row(sample) if one_by_one else sample
        self._report = row_by_row(report) if one_by_one else report

    def find_failed(
        self,
        scheduled: Sequence[ScheduledRequest],
        inputs: StepInputs,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> dict[int, str]:
        """Indices of the scheduled requests whose output is not finite, with the reason."""
        if hidden is None:
            raise RuntimeError("the model did not show its hidden states, which it did when it was inspected")
        if all_finite(hidden) and all_finite(logits):
            return {}
        failed: dict[int, str] = {}
        finite = hidden.isfinite().all(dim=-1).tolist()
        for i, (begin, end) in enumerate(inputs.spans):
            if not all(finite[begin:end]):
                # Which token was first cannot be told: attention carries a NaN to masked positions, too.
                first = scheduled[i].start
                failed[i] = (
                    f"the model's hidden states at positions {first} to {first + end - begin - 1} are not all finite"
                )
        for i, finite_logits in zip(inputs.sampled, logits.isfinite().all(dim=-1).tolist(), strict=True):
            if not finite_logits and i not in failed:
                failed[i] = "the model's logits are not finite"
        return failed

    def score(
        self,
        scheduled: Sequence[ScheduledRequest],
        admitted: Sequence[AdmittedRequest],
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        failed: dict[int, str],
    ) -> dict[int, list[SampledToken]]:
        """Index of a scheduled request -> what StepResult.prompt_logprobs says of it. Adds to `failed`."""
        scores: dict[int, list[SampledToken]] = {}
        for i, (request, kept) in enumerate(zip(scheduled, admitted, strict=True)):
            if kept.prompt is None or hidden is None or i in failed:
                continue
            tokens = kept.prompt[request.start + 1 : request.start + 1 + len(request.token_ids)]
            rows = hidden[inputs.spans[i][0] :][: len(tokens)]
            entries: list[SampledToken] = []
            for begin in range(0, len(tokens), SCORED_ROWS):
                piece = tokens[begin : begin + SCORED_ROWS]
                logits = self._forward.head(rows[begin : begin + SCORED_ROWS])[:, : self._vocab_size].float()
                if not all_finite(logits):
                    failed[i] = "the model's logits at positions of the prompt are not all finite"
                    break
                entries += self._report(logits, piece, [kept.sampling.prompt_logprobs or 0] * len(piece))
            else:
                scores[i] = entries
        return scores

    def sample(
        self,
        scheduled: Sequence[ScheduledRequest],
        admitted: Sequence[AdmittedRequest],
        inputs: StepInputs,
        logits: torch.Tensor,
        failed: dict[int, str],
    ) -> tuple[dict[RequestId, SampledToken], dict[RequestId, str]]:
        """What StepResult.sampled and unsampled say."""
        for request, kept in zip(scheduled, admitted, strict=True):
            kept.extend(request.start, request.token_ids)
        sampling_rows: dict[int, SamplingRow] = {}
        unsampled: dict[RequestId, str] = {}
        for i in inputs.sampled:
            if i not in failed:
                request = scheduled[i]
                try:
                    sampling_rows[i] = admitted[i].row_at(request.start + len(request.token_ids))
                except GrammarError as error:
                    unsampled[request.request_id] = str(error)
        if not sampling_rows:
            return {}, unsampled
        if len(sampling_rows) < len(inputs.sampled):
            logits = logits[[i in sampling_rows for i in inputs.sampled]]
        tokens = self._choose(logits, list(sampling_rows.values()))
        sampled = {scheduled[i].request_id: token for i, token in zip(sampling_rows, tokens, strict=True)}
        return sampled, unsampled


def pool(
    scheduled: Sequence[ScheduledRequest],
    admitted: Sequence[AdmittedRequest],
    inputs: StepInputs,
    hidden: torch.Tensor | None,
    failed: dict[int, str],
) -> dict[RequestId, Embedding]:
    """What StepResult.embeddings says."""
    embeddings: dict[RequestId, Embedding] = {}
    for i, (request, kept) in enumerate(zip(scheduled, admitted, strict=True)):
        if kept.pooler is None or hidden is None or i in failed:
            continue
        begin, end = inputs.spans[i]
        embedding = kept.pooler.take(request.start, hidden[begin:end])
        if embedding is not None:
            embeddings[request.request_id] = embedding
    return embeddings
