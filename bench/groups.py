"""What caching and kernels gain on a model of several groups: full attention and windows, Gemma 3 270M by default.

    OMP_WAIT_POLICY=PASSIVE python bench/groups.py [--model gemma3-270m] [--threads 2] [--repeats 4] [--json]

Prompts share 2,048 tokens and end in 32 new ones. In turn: caching on (`fast`), the same through the layers of
`transformers` (`library`), and caching off (`uncached`); `--engines` leaves some out. Time to the first token, time of
a token after that, and the hit. Medians, with the least and the most in brackets. Run it on a quiet machine.
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
ENGINES = {
    "fast": {},
    "library": {"fast_forward": False},
    "uncached": {"enable_prefix_caching": False},
}


def tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, vocab_size - 1000) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--engines", default=",".join(ENGINES), help="some of fast, library, uncached")
    parser.add_argument("--output", type=int, default=17, help="tokens of each reply")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model, dtype="bfloat16")
    engines = {
        name: LLM(loaded.module, num_blocks=4096, max_model_len=4096, **ENGINES[name])
        for name in options.engines.split(",")
    }
    params = SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True)
    seconds: dict[str, list[float]] = {}
    cached: list[int] = []
    for round_ in range(options.repeats + 1):  # the first one warms up
        stem = tokens(round_, SHARED, loaded.vocab_size)
        for use in ("first", "later"):
            for name, engine in engines.items():
                tail = tokens(1000 * round_ + (use == "later"), NEW, loaded.vocab_size)
                (output,) = engine.generate([[*stem, *tail]], params)
                metrics = output.metrics
                if not round_ or metrics.ttft_s is None or metrics.e2e_s is None:
                    continue
                seconds.setdefault(f"TTFT, {use} use, {name}", []).append(metrics.ttft_s)
                step = (metrics.e2e_s - metrics.ttft_s) / (options.output - 1)
                seconds.setdefault(f"a token after it, {name}", []).append(step)
                if (use, name) == ("later", next(iter(engines))):
                    cached.append(output.num_cached_tokens)
    times = {
        name: {"median": statistics.median(each), "least": min(each), "most": max(each)}
        for name, each in sorted(seconds.items())
    }
    one = next(iter(engines.values()))
    found = {
        "seconds": times,
        "cached_tokens": cached,
        "prompt_tokens": SHARED + NEW,
        "groups": [str(group.kind) for group in one.stats().groups],
        "kv_bytes_per_token": one.engine.kv_bytes_per_token,
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, each in times.items():
        print(f"{name:32} {each['median'] * 1e3:7.1f} ms [{each['least'] * 1e3:.1f} - {each['most'] * 1e3:.1f}]")
    print("cached", cached, "of", SHARED + NEW, "| groups", found["groups"], "| bytes", found["kv_bytes_per_token"])


if __name__ == "__main__":
    main()
