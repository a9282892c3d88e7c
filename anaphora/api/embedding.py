"""What `LLM.embed` gives back: plain numbers out of an engine's output."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.engine.outputs import RequestMetrics, RequestOutput


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one prompt.

    embedding: one row of numbers; with pooling `token` a list of rows, one for each prompt token. None if the request
        failed, then error says why. num_cached_tokens: how much of the prompt was found and not computed.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    embedding: list[float] | list[list[float]] | None
    metrics: RequestMetrics
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput, pooling: str) -> EmbeddingOutput:
        rows = None if output.embedding is None else output.embedding.rows()
        return cls(
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
            embedding=rows if rows is None or pooling == "token" else rows[0],
            metrics=output.metrics,
            error=output.error,
        )
