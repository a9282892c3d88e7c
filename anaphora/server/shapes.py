"""Pieces of replies that several endpoints share: usage, log-probabilities, times. Plain data out of engine outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from anaphora.engine.outputs import Logprob, PromptLogprobs, RequestOutput

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """`cached_tokens` is always there, 0 included."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(outputs: Sequence[RequestOutput], n: int) -> dict[str, Any]:
    """Usage of several prompts with n choices each. A prompt counts once; its hit is that of its first choice."""
    firsts = outputs[::n]
    return usage(
        sum(len(output.prompt_token_ids) for output in firsts),
        sum(output.num_cached_tokens for output in firsts),
        sum(len(output.outputs[0].token_ids) for output in outputs),
    )


def timings(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Where the time of a reply went, in ms: the parts add up to ttft_ms, ttft_ms and decode_ms to e2e_ms.

    Of the first output until its first token, then to the end of the last one. Nothing is known before the end without
    a token. Rounded to a tenth of a millisecond; the sums are those of the rounded values.
    """
    first, e2e_s = outputs[0].metrics, max(output.metrics.e2e_s for output in outputs)
    if first.ttft_parts is None:
        return {"ttft_parts_ms": None, "ttft_ms": None, "decode_ms": None, "e2e_ms": _ms(e2e_s)}
    parts = {name.removesuffix("_s"): _ms(seconds) for name, seconds in asdict(first.ttft_parts).items()}
    ttft_ms = round(sum(parts.values()), 1)
    decode_ms = _ms(e2e_s - first.ttft_parts.total_s)
    return {
        "ttft_parts_ms": parts,
        "ttft_ms": ttft_ms,
        "decode_ms": decode_ms,
        "e2e_ms": round(ttft_ms + decode_ms, 1),
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def token_text(token_id: int, entry: Logprob, *, as_id: bool = False) -> str:
    """A token as text; as `token_id:7` where there is no tokenizer or the client wants ids."""
    return f"token_id:{token_id}" if as_id or entry.decoded_token is None else entry.decoded_token


def completion_logprobs(
    steps: Sequence[Mapping[int, Logprob]],
    num_top: int,
    *,
    as_ids: bool,
    offset: int = 0,
    first_token: str | None = None,
) -> dict[str, Any]:
    """OpenAI's legacy shape: four lists, one entry a token. offset: of the first token in the text.

    first_token: a token before the others that nothing precedes, so that it has no log-probability.

    Two likely tokens may decode to the same text (bytes that are no character): then all but the first are named by id.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    if first_token is not None:
        tokens, chosen, tops, offsets, offset = [first_token], [None], [None], [offset], offset + len(first_token)
    for step in steps:
        (token_id, entry), *_ = step.items()
        text = token_text(token_id, entry, as_id=as_ids)
        tokens.append(text)
        chosen.append(finite(entry.logprob))
        offsets.append(offset)
        offset += len(text)
        top: dict[str, float] = {}
        for index, (other_id, other) in enumerate(step.items()):
            if index == 0 or other.rank <= num_top:
                name = token_text(other_id, other, as_id=as_ids)
                top[f"token_id:{other_id}" if name in top else name] = finite(other.logprob)
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(steps: Sequence[Mapping[int, Logprob]], num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """OpenAI's chat shape: for each token its log-probability and those of the likeliest."""
    content = []
    for step in steps:
        (token_id, entry), *_ = step.items()
        top = [
            _chat_entry(other_id, other, as_ids)
            for other_id, other in sorted(step.items(), key=lambda item: item[1].rank)
            if other.rank <= num_top
        ]
        content.append({**_chat_entry(token_id, entry, as_ids), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: PromptLogprobs, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token null (the first) or token id -> logprob, rank, decoded_token."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for index, (token_id, one) in enumerate(entry.items())
            if index == 0 or one.rank <= num_top
        }
        for entry in entries
    ]


def _chat_entry(token_id: int, entry: Logprob, as_id: bool) -> dict[str, Any]:
    text = entry.decoded_token
    known = text is not None and REPLACEMENT not in text
    return {
        "token": token_text(token_id, entry, as_id=as_id),
        "logprob": finite(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")) if known and text is not None else None,
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
