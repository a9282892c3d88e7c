"""Claims: what quantised weights cost in perplexity, through the kernels of decode steps, is within a bound."""

from __future__ import annotations

import math

import pytest

from anaphora import LLM, SamplingParams

pytestmark = pytest.mark.models

TEXT = (
    "The harbour was quiet in the early morning. Two fishing boats came back with the tide, and the women on the pier "
    "counted the boxes as they were lifted out. Nobody spoke of the storm, although everybody had heard it, and when "
    "the last box stood on the stones, the oldest of them wrote a number into her book and closed it."
)


def perplexity(form: str | None) -> float:
    llm = LLM("smollm2-135m", num_blocks=64, quantization=form, max_num_batched_tokens=8)
    (output,) = llm.generate([TEXT], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    scores = [entry[token].logprob for token, entry in pairs if entry is not None]
    return math.exp(-sum(scores) / len(scores))


def test_perplexity_is_within_two_per_cent_of_that_of_full_weights() -> None:
    full = perplexity(None)
    for form in ("int8", "int4"):
        assert perplexity(form) == pytest.approx(full, rel=0.02)
