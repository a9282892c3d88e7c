"""Real weights: in reproducible mode cached, batched and chunked answers are the uncached ones, bit for bit."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from anaphora import LLM, SamplingParams
from anaphora.engine.outputs import RequestOutput
from anaphora.runtime.model import load_model

pytestmark = pytest.mark.models

STEM = "The cache keeps what has been computed before, and whoever asks the same beginning again gets it at once. " * 14
ENDS = ("Why?", "In other words:", "A poem about it:\n")
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, ignore_eos=True)


def results(output: RequestOutput) -> str:
    """Tokens and logprobs, to the last bit."""
    return repr((output.outputs[0].token_ids, output.outputs[0].logprobs))


def test_smollm2_gives_the_same_bits() -> None:
    loaded = load_model("smollm2-135m", dtype="bfloat16")
    prompts = [STEM[: 700 * number] + end for number, end in enumerate(ENDS)]

    def start(**options: object) -> LLM:
        return LLM(loaded.module, tokenizer=loaded.tokenizer, num_blocks=256, reproducible=True, **options)

    alone = start(enable_prefix_caching=False)
    expected = [results(alone.generate([prompt], PARAMS)[0]) for prompt in prompts]
    together = start(max_num_batched_tokens=100, long_prefill_token_threshold=70)
    assert [results(output) for output in together.generate(prompts, PARAMS)] == expected
    again = together.generate(prompts[::-1], PARAMS)
    assert [results(output) for output in again] == expected[::-1]
    assert again[0].num_cached_tokens > 200
