"""What the engine remembers of one request besides the scheduler: its text, log-probabilities and times.

Turns tokens into outputs. It must not decide when a request runs; it only says when a stop string ended the text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from anaphora.core.plan import Embedding, SampledToken
from anaphora.core.request import Request
from anaphora.engine.detokenizer import Detokenizer
from anaphora.engine.outputs import (
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    StepOutput,
)
from anaphora.engine.protocols import Tokenizer
from anaphora.engine.stop_strings import StopStrings
from anaphora.engine.ttft import TtftClock, TtftParts


class LiveRequest:
    """One request from add_request to its last output. Times are seconds by the engine's clock."""

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, arrival_s: float, ttft: TtftClock
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.arrival_s = arrival_s
        self.ttft = ttft
        self._first_token_s: float | None = None
        self._ttft_parts: TtftParts | None = None
        self.num_computed_prompt_tokens = 0
        self.embedding: Embedding | None = None
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._detokenizer = (
            Detokenizer(tokenizer, request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens)
            if tokenizer is not None
            else None
        )
        self._stops = StopStrings(sampling.stop, include_in_output=sampling.include_stop_str_in_output)
        self._texts: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if sampling.logprobs is None else []
        self._prompt_logprobs: PromptLogprobs | None = None if sampling.prompt_logprobs is None else [None]
        self._gave_prompt_logprobs = False
        self._decoded_prompt_tokens: dict[int, str] = {}  # a prompt is long and repeats itself

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    @property
    def has_begun(self) -> bool:
        """Whether it has its first token."""
        return self._first_token_s is not None

    def add_token(self, token: SampledToken, now_s: float, *, ends_output: bool) -> StepOutput:
        """Take a new token. ends_output: it is an end token, which has no part in the text unless asked for."""
        is_first = not self.has_begun
        if is_first:
            self._first_token_s, self._ttft_parts = now_s, self.ttft.stop(now_s)
        entry = {} if self._logprobs is None else self._entry(token)
        if self._logprobs is not None:
            self._logprobs.append(entry)
        text = ""
        if self._detokenizer is not None and (not ends_output or self.request.sampling.include_stop_str_in_output):
            text = self._stops.add(self._detokenizer.add(token.token_id), may_end=self._may_stop)
        self._texts.append(text)
        return StepOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=(token.token_id,),
            logprobs=None if self._logprobs is None else (entry,),
            prompt_logprobs=self._new_prompt_logprobs(),
            ttft_parts=self._ttft_parts if is_first else None,
        )

    def add_prompt_logprobs(self, first: int, tokens: Sequence[SampledToken]) -> None:
        """Take what is known of the prompt tokens at positions `first` and on.

        What is known already comes again after a preemption, and is passed over.
        """
        if self._prompt_logprobs is not None:
            for token in tokens[len(self._prompt_logprobs) - first :]:
                is_row = self._is_row(len(self._prompt_logprobs))
                self._prompt_logprobs.append(None if is_row else self._entry(token, self._decoded_prompt_tokens))

    def _is_row(self, position: int) -> bool:
        """Whether the caller gave a row there: it has no probability, as it is no token."""
        features = self.request.features
        span = bisect_right(features, position, key=lambda span: span.start) - 1
        return span >= 0 and not features[span].has_tokens and position < features[span].stop

    def _new_prompt_logprobs(self) -> PromptLogprobs | None:
        """For the first StepOutput only."""
        given, self._gave_prompt_logprobs = self._gave_prompt_logprobs, True
        return None if given else self._prompt_logprobs

    @property
    def _may_stop(self) -> bool:
        """Whether a stop string may end in the text of the latest token."""
        return self.request.num_output_tokens > self.request.sampling.min_tokens

    def finish(self, step: StepOutput | None, reason: str, error: str | None, now_s: float) -> StepOutput:
        """The last output: what was held back is given out, and the whole is put together, once."""
        rest = ""
        if self._detokenizer is not None and self.matched_stop is None:
            rest = self._stops.flush() + self._detokenizer.flush()  # the end is decided: no stop string is sought here
            self._texts.append(rest)
        return StepOutput(
            request_id=self.request.request_id,
            text=(step.text if step else "") + rest,
            token_ids=step.token_ids if step else (),
            logprobs=step.logprobs if step else None if self._logprobs is None else (),
            output=self._output(reason, error, now_s),
            prompt_logprobs=step.prompt_logprobs if step else self._new_prompt_logprobs(),
            ttft_parts=step.ttft_parts if step else None,
        )

    def _output(self, reason: str, error: str | None, now_s: float) -> RequestOutput:
        request = self.request
        completion = CompletionOutput(
            index=0,
            text="".join(self._texts),
            token_ids=request.output_token_ids,
            logprobs=self._logprobs,
            finish_reason=reason,
            stop_reason=self.matched_stop if self.matched_stop is not None else request.stop_reason,
        )
        metrics = RequestMetrics(
            arrival_s=self.arrival_s,
            e2e_s=now_s - self.arrival_s,
            ttft_s=None if self._first_token_s is None else self._first_token_s - self.arrival_s,
            ttft_parts=self._ttft_parts,
            num_preemptions=request.num_preemptions,
            num_computed_prompt_tokens=self.num_computed_prompt_tokens,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.prompt_token_ids,
            num_cached_tokens=request.num_cached_tokens,
            outputs=[completion],
            finished=True,
            metrics=metrics,
            error=error,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self.embedding,
        )

    def _entry(self, token: SampledToken, decoded: dict[int, str] | None = None) -> dict[int, Logprob]:
        """The token itself first, then the likeliest ones. decoded: texts known, added to."""
        if token.logprob is None or token.rank is None:
            return {}
        entry = {int(token.token_id): Logprob(token.logprob, token.rank, self._decoded(token.token_id, decoded))}
        for rank, (token_id, logprob) in enumerate(token.top_logprobs, start=1):
            if token_id not in entry:
                entry[int(token_id)] = Logprob(logprob, rank, self._decoded(token_id, decoded))
        return entry

    def _decoded(self, token_id: int, decoded: dict[int, str] | None) -> str | None:
        if self._tokenizer is None:
            return None
        text = None if decoded is None else decoded.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id])
            if decoded is not None:
                decoded[token_id] = text
        return text
