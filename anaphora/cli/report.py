"""What the commands say about a finished request: one line for people, plain data for machines."""

from __future__ import annotations

import dataclasses
from typing import Any

from anaphora.engine.engine import Engine
from anaphora.engine.outputs import RequestOutput
from anaphora.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Limits:
    """What can end an output early, in tokens. pool_tokens: of one request, as many as the pool can hold."""

    max_tokens: int
    max_model_len: int | None
    pool_tokens: int

    @classmethod
    def of(cls, engine: Engine, params: SamplingParams) -> Limits:
        return cls(params.max_tokens, engine.max_model_len, engine.capacity_tokens)

    def reached(self, num_prompt_tokens: int, num_new_tokens: int) -> str | None:
        """Which limit these counts reach, in the scheduler's order; None if none."""
        num_tokens = num_prompt_tokens + num_new_tokens
        if num_new_tokens >= self.max_tokens:
            return "max_tokens"
        if self.max_model_len is not None and num_tokens >= self.max_model_len:
            return "max_model_len"
        return "pool full" if num_tokens > self.pool_tokens else None


def request_line(output: RequestOutput, limits: Limits) -> str:
    """How much was reused and how long it took: `cached 1,664 of 1,703 tokens · computed 39 · TTFT 0.210 s · ...`."""
    metrics, completion = output.metrics, output.outputs[0]
    parts = [
        f"cached {output.num_cached_tokens:,} of {len(output.prompt_token_ids):,} tokens",
        f"computed {metrics.num_computed_prompt_tokens:,}",
    ]
    if metrics.ttft_s is not None:
        parts.append(f"TTFT {metrics.ttft_s:.3f} s")
    rate = decode_rate(output)
    if rate is not None:
        parts.append(f"{rate:.1f} tok/s")
    reason = completion.finish_reason
    if reason == "length" and (limit := limits.reached(len(output.prompt_token_ids), len(completion.token_ids))):
        reason = f"length: {limit}"
    parts.append(f"{len(completion.token_ids):,} new ({reason})")
    return " · ".join(parts)


def decode_rate(output: RequestOutput) -> float | None:
    """Tokens per second after the first one; None with fewer than two tokens."""
    metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    if num_tokens < 2 or metrics.ttft_s is None or metrics.e2e_s <= metrics.ttft_s:
        return None
    return (num_tokens - 1) / (metrics.e2e_s - metrics.ttft_s)


def request_document(output: RequestOutput) -> dict[str, Any]:
    """One request for `--json`. Times in seconds; logprobs only if they were asked for."""
    completion = output.outputs[0]
    document: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": output.error,
        "prompt_token_ids": list(output.prompt_token_ids),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_computed_prompt_tokens": output.metrics.num_computed_prompt_tokens,
        "num_preemptions": output.metrics.num_preemptions,
        "ttft_parts": None if output.metrics.ttft_parts is None else dataclasses.asdict(output.metrics.ttft_parts),
        "ttft_s": output.metrics.ttft_s,
        "e2e_s": output.metrics.e2e_s,
    }
    if completion.logprobs is not None:
        document["logprobs"] = [
            [{"token_id": token_id, **dataclasses.asdict(entry)} for token_id, entry in position.items()]
            for position in completion.logprobs
        ]
    return document
