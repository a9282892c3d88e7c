"""The verbs of the scenarios, mapped to the Python API once. See the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from tiny_llama import make_tiny_llama
from transformers import LlamaForCausalLM

from anaphora import LLM, SamplingParams
from anaphora.engine.outputs import EngineStats, RequestOutput

BLOCK_SIZE = 16
TOLERANCE = 1e-3
NEAR_TIE = 1e-4


@cache
def tiny_llama() -> LlamaForCausalLM:
    return make_tiny_llama()


def cap(num_tokens: int) -> int:
    """The most that an exact repeat can hit: whole blocks, and the last token is computed."""
    return BLOCK_SIZE * ((num_tokens - 1) // BLOCK_SIZE)


def params(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2, **options)  # type: ignore[arg-type]


def start(num_blocks: int = 256, **options: object) -> LLM:
    """START: a fresh engine on model M."""
    options.setdefault("block_size", BLOCK_SIZE)
    return LLM(tiny_llama(), num_blocks=num_blocks, dtype="float32", num_threads=1, **options)  # type: ignore[arg-type]


def gen(llm: LLM, prompt: Sequence[int], max_tokens: int = 1, **options: object) -> RequestOutput:
    """GEN: one request, alone."""
    return llm.generate([list(prompt)], params(max_tokens), **options)[0]  # type: ignore[arg-type]


def gen_all(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> list[RequestOutput]:
    """GEN of several requests at once."""
    return llm.generate([list(prompt) for prompt in prompts], params(max_tokens))


@dataclass(frozen=True)
class Blocks:
    """STATS: blocks by state."""

    live: int
    cached: int
    blank: int

    @property
    def total(self) -> int:
        return self.live + self.cached + self.blank


def blocks(stats: EngineStats) -> Blocks:
    gauges = stats.gauges
    return Blocks(gauges.num_live_blocks, gauges.num_cached_blocks, gauges.num_blank_blocks)


def chosen(output: RequestOutput) -> list[tuple[int, float]]:
    """(token id, logprob) of each step."""
    sequence = output.outputs[0]
    assert sequence.logprobs is not None
    return [(token, entry[token].logprob) for token, entry in zip(sequence.token_ids, sequence.logprobs, strict=True)]


class Comparison:
    """EQUAL over one run: excuses (near-ties of the reference) are counted and bounded."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.num_excused = 0

    def equal(self, output: RequestOutput, reference: RequestOutput) -> None:
        expected = chosen(reference)
        actual = chosen(output)
        assert len(actual) == len(expected)
        self.num_compared += 1
        second = reference.outputs[0].logprobs
        assert second is not None
        for step, ((token, logprob), (right, right_logprob)) in enumerate(zip(actual, expected, strict=True)):
            if token != right:
                best, other = sorted((entry.logprob for entry in second[step].values()), reverse=True)[:2]
                assert best - other < NEAR_TIE, f"step {step}: token {token}, reference {right}"
                self.num_excused += 1
                break
            assert abs(logprob - right_logprob) < TOLERANCE, f"step {step}: {logprob} against {right_logprob}"

    def close(self) -> None:
        assert self.num_excused * 200 <= self.num_compared, f"{self.num_excused} excuses in {self.num_compared}"


@cache
def _cold_engine() -> LLM:
    return start(num_blocks=256, enable_prefix_caching=False)


@cache
def _cold(prompt: tuple[int, ...], max_tokens: int) -> RequestOutput:
    return gen(_cold_engine(), prompt, max_tokens)


def cold(prompt: Sequence[int], max_tokens: int) -> RequestOutput:
    """The same request alone, cache off. Nothing is kept between requests then, so one engine serves for all."""
    return _cold(tuple(prompt), max_tokens)


def transformers_logprobs(prompt: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
    """[len(output_ids), vocab]: what `transformers` itself gives, one forward pass without any cache."""
    tokens = torch.tensor([[*prompt, *output_ids]])
    module = tiny_llama()
    implementation = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = module(input_ids=tokens, use_cache=False).logits[0]
    finally:
        module.set_attn_implementation(implementation)
    return torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
