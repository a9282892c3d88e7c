"""What the engine remembers of one request besides the scheduler: its text, log-probabilities and times.

Turns tokens into outputs. It must not decide when a request runs; it only says when a stop string ended the text.
"""

from __future__ import annotations

from anaphora.core.plan import SampledToken
from anaphora.core.request import Request
from anaphora.engine.detokenizer import Detokenizer
from anaphora.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StepOutput
from anaphora.engine.protocols import Tokenizer
from anaphora.engine.stop_strings import StopStrings


class LiveRequest:
    """One request from add_request to its last output. Times are seconds by the engine's clock."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, arrival_s: float) -> None:
        sampling = request.sampling
        self.request = request
        self.arrival_s = arrival_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.num_computed_prompt_tokens = 0
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

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def add_token(self, token: SampledToken, *, ends_output: bool) -> StepOutput:
        """Take a new token. ends_output: it is an end token, which has no part in the text unless asked for."""
        entry = self._logprobs_of(token)
        if self._logprobs is not None:
            self._logprobs.append(entry)
        text = ""
        if self._detokenizer is not None and (not ends_output or self.request.sampling.include_stop_str_in_output):
            text = self._stops.add(self._detokenizer.add(token.token_id))
        self._texts.append(text)
        return StepOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=(token.token_id,),
            logprobs=None if self._logprobs is None else (entry,),
        )

    def finish(self, step: StepOutput | None, reason: str, error: str | None, now_s: float) -> StepOutput:
        """The last output: what was held back is given out, and the whole is put together, once."""
        rest = ""
        if self._detokenizer is not None and self.matched_stop is None:
            rest = self._stops.add(self._detokenizer.flush())
            rest += "" if self.matched_stop is not None else self._stops.flush()
            self._texts.append(rest)
        return StepOutput(
            request_id=self.request.request_id,
            text=(step.text if step else "") + rest,
            token_ids=step.token_ids if step else (),
            logprobs=step.logprobs if step else None if self._logprobs is None else (),
            output=self._output(reason, error, now_s),
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
            queue_s=None if self.admitted_s is None else self.admitted_s - self.arrival_s,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrival_s,
            e2e_s=now_s - self.arrival_s,
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
        )

    def _logprobs_of(self, token: SampledToken) -> dict[int, Logprob]:
        """The chosen token first, then the likeliest ones; empty unless asked for."""
        if self._logprobs is None or token.logprob is None:
            return {}
        entry = {int(token.token_id): Logprob(token.logprob, token.rank, self._decoded(token.token_id))}
        for rank, (token_id, logprob) in enumerate(token.top_logprobs, start=1):
            if token_id not in entry:
                entry[int(token_id)] = Logprob(logprob, rank, self._decoded(token_id))
        return entry

    def _decoded(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id])
