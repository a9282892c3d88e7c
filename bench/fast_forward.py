"""Time of a decode step and of the first token, with the engine's own forward pass and with transformers' layers.

    python bench/fast_forward.py [model] [rounds]

Two engines over one module; each round asks both the same: a step at 16 and at 2,048 tokens of context, the first token
of 2,048 cached + 32 new tokens and (in the first two rounds) of 2,080 new ones. Milliseconds: least, median, most.
"""

from __future__ import annotations

import os
import random
import statistics
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from anaphora import LLM, SamplingParams
from anaphora.runtime.model import load_model

COLD_ROUNDS = 2


def main(model: str = "smollm2-135m", rounds: str = "5") -> None:
    module = load_model(model).module
    engines = {
        name: LLM(module, num_blocks=2048, fast_forward=fast) for name, fast in (("library", False), ("fast", True))
    }
    draw = random.Random(1)
    one, nine = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 9))

    def tokens(count: int) -> list[int]:
        return [draw.randrange(100, module.config.vocab_size) for _ in range(count)]

    stem = tokens(2048)
    for llm in engines.values():
        llm.generate([stem + tokens(32)], nine)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(int(rounds)):
        short, question, cold = tokens(16), tokens(32), tokens(2080)
        for name, llm in engines.items():
            for label, prompt in (("16", short), ("2048", stem + question)):
                metrics = llm.generate([prompt], nine)[0].metrics
                times.setdefault((f"step at {label}", name), []).append((metrics.e2e_s - metrics.ttft_s) / 8)
                if label == "2048":
                    times.setdefault(("first token, hit", name), []).append(metrics.ttft_s)
            if number < COLD_ROUNDS:
                metrics = llm.generate([cold], one)[0].metrics
                times.setdefault(("first token, cold", name), []).append(metrics.ttft_s)
    for (row, name), values in sorted(times.items()):
        ms = [1e3 * value for value in (min(values), statistics.median(values), max(values))]
        print(f"{row:18} {name:8} " + " ".join(f"{value:8.1f}" for value in ms))


if __name__ == "__main__":
    main(*sys.argv[1:])
