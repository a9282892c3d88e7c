"""The text that Prometheus scrapes, as numbers; and which of them mean what, for the servers that we know.

Names: Anaphora's docs/operations.md, vLLM's and SGLang's pages on production metrics, llama.cpp's server README.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "queried_tokens": ("anaphora:prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
    "hit_tokens": (
        "anaphora:prefix_cache_hits_total",
        "vllm:prefix_cache_hits_total",
        "sglang:cached_tokens_total",
    ),
    "prompt_tokens": (
        "anaphora:prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
    ),
    "computed_prompt_tokens": ("anaphora:prompt_tokens_computed_total", "llamacpp:prompt_tokens_total"),
    "generated_tokens": (
        "anaphora:generation_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    "evicted_blocks": ("anaphora:evicted_blocks_total",),
    "preemptions": ("anaphora:num_preemptions_total", "vllm:num_preemptions_total"),
}
"""Our name -> the servers' names, of which one server has one."""


@dataclass(frozen=True, slots=True)
class MetricSample:
    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[MetricSample]:
    """Samples of the exposition format; lines that are none are left out."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        samples.append(MetricSample(match[1], dict(_LABEL.findall(match[2] or "")), value))
    return samples


def known_counters(samples: Iterable[MetricSample]) -> dict[str, int] | None:
    """By the names of `measurement.COUNTERS`, summed over labels; None if no known one is among them."""
    sums: dict[str, float] = {}
    for sample in samples:
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    found = {ours: int(sums[theirs]) for ours, names in _COUNTERS.items() for theirs in names if theirs in sums}
    return found or None


def pool_tokens(samples: Iterable[MetricSample]) -> int | None:
    """Tokens that the server's cache holds; None where its metrics do not say."""
    for sample in samples:
        if sample.name == "vllm:cache_config_info":
            size, blocks = sample.labels.get("block_size", ""), sample.labels.get("num_gpu_blocks", "")
            if size.isdigit() and blocks.isdigit():
                return int(size) * int(blocks)
        if sample.name in ("anaphora:kv_cache_tokens", "sglang:max_total_num_tokens"):
            return int(sample.value)
    return None
