"""What quantised weights cost and give: perplexity of a fixed text, memory, a decode step, time to the first token.

    OMP_WAIT_POLICY=PASSIVE python bench/quantization.py [--model NAME] [--threads 2] [--rounds 3] [--tokens 4096]

The text is this project's own pages, in pieces of 1,024 tokens, scored as prompts by the engine itself: English with
tables, so compare its perplexities with each other only. `decoding`: in steps of 8 tokens, which run through the same
kernels as a decode step. All engines answer in turn; least, median, most.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from pathlib import Path

import torch

from anaphora import LLM, SamplingParams

PAGES = ("architecture", "server", "hash-format", "operations", "security")
PIECE_TOKENS = 1024
WAYS: dict[str, str | None] = {"full": None, "int8": "int8", "int4": "int4"}
DECODING_TOKENS = 8


def perplexity(llm: LLM, pieces: list[list[int]]) -> float:
    """exp of the mean negative log-probability of every token but each piece's first."""
    total, count = 0.0, 0
    for piece in pieces:
        (output,) = llm.generate([piece], SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert output.prompt_logprobs is not None
        for token, entry in zip(piece, output.prompt_logprobs, strict=True):
            if entry is not None:
                total, count = total - entry[token].logprob, count + 1
    return math.exp(total / count)


def pieces_of_the_pages(llm: LLM, num_tokens: int) -> list[list[int]]:
    folder = Path(__file__).parents[1] / "docs"
    text = "\n".join((folder / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    ids = list(llm.engine.encode(text))[:num_tokens]  # type: ignore[arg-type]
    return [ids[begin : begin + PIECE_TOKENS] for begin in range(0, len(ids), PIECE_TOKENS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of the text; 0 leaves perplexity out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engines = {
        name: LLM(args.model, num_blocks=1024, quantization=quantization, warm_up=True)
        for name, quantization in WAYS.items()
    }
    for name, llm in engines.items():
        print(f"{name:5} weights, bytes {llm.engine.weights_bytes:>14,}")
        if args.tokens:
            pieces = pieces_of_the_pages(llm, args.tokens)
            decoding = LLM(args.model, num_blocks=1024, quantization=WAYS[name], max_num_batched_tokens=DECODING_TOKENS)
            print(
                f"{name:5} perplexity     {perplexity(llm, pieces):14.4f}, decoding {perplexity(decoding, pieces):.4f}"
            )
    draw = random.Random(1)
    one, many = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 17))
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        prompt = [draw.randrange(100, 30_000) for _ in range(2080)]
        for name, llm in engines.items():
            metrics = llm.generate([prompt], one)[0].metrics
            times.setdefault(("first token, 2,080 new", name), []).append(metrics.ttft_s or math.nan)
            metrics = llm.generate([prompt], many)[0].metrics
            step_s = (metrics.e2e_s - (metrics.ttft_s or math.nan)) / 16
            times.setdefault(("step at 2,080", name), []).append(step_s)
            times.setdefault(("first token, 2,064 of 2,080 cached", name), []).append(metrics.ttft_s or math.nan)
            metrics = llm.generate([prompt[:16]], many)[0].metrics
            times.setdefault(("step at 16", name), []).append((metrics.e2e_s - (metrics.ttft_s or math.nan)) / 16)
    for (row, name), seconds in sorted(times.items()):
        least, middle, most = (1e3 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
        print(f"{row:36} {name:5} ms {least:8.1f} {middle:8.1f} {most:8.1f}")


if __name__ == "__main__":
    main()
