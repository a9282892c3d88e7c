"""Cached answers against uncached ones, token for token and bit for bit, and what the reproducible mode costs.

    python bench/reproducible.py equal [model] [prompts] [tokens] [usual,reproducible]
    python bench/reproducible.py cost [model] [rounds]

`equal`: greedy answers to texts with a long beginning in common. Each is computed alone with caching off, then with
caching: alone after the others, all at once, and all at once in small steps; counted are answers with the same tokens,
and with the same bits in every logprob. `cost`: both modes in turn on one module; milliseconds, or tokens a second for
the 8 sharers: least, median, most.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from anaphora import LLM, SamplingParams
from anaphora.engine.outputs import RequestOutput
from anaphora.runtime.model import load_model

DOCS = Path(__file__).parents[1] / "docs"
STEM_CHARS = 2400
QUESTION_CHARS = 160
SHARERS = 8


def texts(count: int) -> list[str]:
    """One beginning, longer for some than for others, and each its own end."""
    stem = (DOCS / "architecture.md").read_text()[:STEM_CHARS]
    ends = (DOCS / "server.md").read_text()
    draw = random.Random(1)
    cut = [draw.choice((0, STEM_CHARS // 3, STEM_CHARS)) for _ in range(count)]
    return [
        stem[:length] + "\n\n" + ends[QUESTION_CHARS * i : QUESTION_CHARS * (i + 1)] for i, length in enumerate(cut)
    ]


def answer(output: RequestOutput) -> tuple[list[int], str]:
    """Its tokens, and all of its logprobs to the last bit."""
    (sequence,) = output.outputs
    return sequence.token_ids, repr(sequence.logprobs)


def equal(
    model: str = "smollm2-135m", prompts: str = "32", tokens: str = "16", modes: str = "usual,reproducible"
) -> None:
    loaded = load_model(model)
    sampling = SamplingParams(max_tokens=int(tokens), temperature=0.0, ignore_eos=True, logprobs=1)
    asked = texts(int(prompts))
    print(f"{model}, {prompts} prompts, {tokens} tokens each: equal tokens / equal bits")
    for mode in modes.split(","):

        def start(caching: bool, budget: int, on: bool = mode == "reproducible") -> LLM:
            return LLM(
                loaded.module,
                tokenizer=loaded.tokenizer,
                num_blocks=1024,
                enable_prefix_caching=caching,
                max_num_batched_tokens=budget,
                reproducible=on,
            )

        def one_by_one(llm: LLM) -> list[tuple[list[int], str]]:
            return [answer(llm.generate([text], sampling)[0]) for text in asked]

        right = one_by_one(start(False, 512))
        ways: dict[str, Callable[[], Any]] = {
            "alone, after the others": lambda: one_by_one(start(True, 512)),
            "all at once": lambda: [answer(output) for output in start(True, 512).generate(asked, sampling)],
            "all at once, 100 tokens a step": lambda: [
                answer(output) for output in start(True, 100).generate(asked, sampling)
            ],
        }
        for way, compute in ways.items():
            got = compute()
            same = [sum(a[part] == b[part] for a, b in zip(right, got, strict=True)) for part in (0, 1)]
            print(f"  {mode:13} {way:32} {same[0]:3} / {same[1]:3}", flush=True)


def cost(model: str = "smollm2-135m", rounds: str = "3") -> None:
    module = load_model(model).module
    engines = {
        name: LLM(module, num_blocks=1024, reproducible=on) for name, on in (("usual", False), ("reproducible", True))
    }
    draw = random.Random(1)
    nine = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(100, module.config.vocab_size) for _ in range(count)]

    times: dict[tuple[str, str], list[float]] = {}
    for number in range(int(rounds) + 1):
        stem, question, short = tokens(2048), tokens(32), tokens(16)
        others = [stem + tokens(32) for _ in range(SHARERS)]
        for name, llm in engines.items():
            found = {}
            for label, prompt in (("first token, cold", stem + tokens(32)), ("first token, hit", stem + question)):
                metrics = llm.generate([prompt], nine)[0].metrics
                found[label] = 1e3 * (metrics.ttft_s or 0.0)
            found["token at 2048"] = 1e3 * (metrics.e2e_s - (metrics.ttft_s or 0.0)) / 8
            metrics = llm.generate([short], nine)[0].metrics
            found["token at 16"] = 1e3 * (metrics.e2e_s - (metrics.ttft_s or 0.0)) / 8
            begin = time.perf_counter()
            llm.generate(others, nine)
            found[f"{SHARERS} sharers, tok/s"] = 9 * SHARERS / (time.perf_counter() - begin)
            if number:  # the first round warms up
                for label, value in found.items():
                    times.setdefault((label, name), []).append(value)
    for (row, name), values in sorted(times.items()):
        print(f"{row:18} {name:12} " + " ".join(f"{f(values):8.1f}" for f in (min, statistics.median, max)))


if __name__ == "__main__":
    {"equal": equal, "cost": cost}[sys.argv[1]](*sys.argv[2:])
