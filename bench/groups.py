"""What caching gains on a model of several groups: full attention and sliding windows, Gemma 3 270M by default.

    OMP_WAIT_POLICY=PASSIVE python bench/groups.py [--model gemma3-270m] [--threads 2] [--repeats 4] [--json]

Prompts share 2,048 tokens and end in 32 new ones. Caching on and off in turn: time to the first token, and the hit
rate. Medians, with the least and the most in brackets. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

import torch

from anaphora import LLM, SamplingParams
from anaphora.runtime.model import load_model

SHARED, NEW = 2048, 32


def tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, vocab_size - 1000) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model, dtype="bfloat16")
    engines = {
        name: LLM(loaded.module, num_blocks=4096, enable_prefix_caching=on, max_model_len=4096)
        for name, on in (("on", True), ("off", False))
    }
    params = SamplingParams(max_tokens=1, temperature=0.0)
    seconds: dict[str, list[float]] = {"first, on": [], "first, off": [], "later, on": [], "later, off": []}
    cached: list[int] = []
    for round_ in range(options.repeats + 1):  # the first one warms up
        stem = tokens(round_, SHARED, loaded.vocab_size)
        for use in ("first", "later"):
            for name, engine in engines.items():
                tail = tokens(1000 * round_ + (use == "later"), NEW, loaded.vocab_size)
                (output,) = engine.generate([[*stem, *tail]], params)
                if round_ and output.metrics.ttft_s is not None:
                    seconds[f"{use}, {name}"].append(output.metrics.ttft_s)
                    if (use, name) == ("later", "on"):
                        cached.append(output.num_cached_tokens)
    found = {
        "ttft_s": {
            name: {"median": statistics.median(each), "least": min(each), "most": max(each)}
            for name, each in seconds.items()
        },
        "cached_tokens": cached,
        "prompt_tokens": SHARED + NEW,
        "groups": [str(group.kind) for group in engines["on"].stats().groups],
        "kv_bytes_per_token": engines["on"].engine.kv_bytes_per_token,
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, each in found["ttft_s"].items():  # type: ignore[attr-defined]
        print(f"{name:12} {each['median'] * 1e3:7.0f} ms [{each['least'] * 1e3:.0f} - {each['most'] * 1e3:.0f}]")
    print("cached", cached, "of", SHARED + NEW, "| groups", found["groups"], "| bytes", found["kv_bytes_per_token"])


if __name__ == "__main__":
    main()
