"""The engine beside `transformers` generate: same model object, dtype, threads and process, in turn.

    OMP_WAIT_POLICY=PASSIVE python bench/data_plane.py [--model smollm2-135m] [--threads 2] [--repeats 5] [--json]

Time to the first token, cold and hit, for shared prefixes of 128, 512 and 2,048 tokens and 32 new ones; prefill and
decode against `transformers`; eight requests that share 2,048 tokens, and eight that each have as many of their own in
the cache, so that attention shares nothing; what caching costs where nothing is reused.
Medians, with the least and the most in brackets. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch

from anaphora import LLM, SamplingParams
from anaphora.runtime.model import load_model

NEW_TOKENS = 32


class Bench:
    def __init__(self, model: str, threads: int, repeats: int) -> None:
        torch.set_num_threads(threads)
        loaded = load_model(model, dtype="bfloat16")
        self.module, self.vocab_size, self.repeats = loaded.module, loaded.vocab_size, repeats
        self.on = self.engine(True)
        self.off = self.engine(False)
        self._seed = 0

    def engine(self, caching: bool) -> LLM:
        llm = LLM(self.module, num_blocks=2048, enable_prefix_caching=caching, max_num_batched_tokens=512)
        # A pool takes memory page by page as it fills. Touch all of it first: an engine that caches walks through new
        # pages where one that does not uses the same few again, and that is no cost of caching.
        pool = llm.engine._executor.cache  # type: ignore[attr-defined]
        for tensor in (*pool.keys, *pool.values):
            tensor.zero_()
        return llm

    def tokens(self, count: int) -> list[int]:
        self._seed += 1
        draw = random.Random(self._seed)
        return [draw.randrange(1000, self.vocab_size - 1000) for _ in range(count)]

    def ttft(self, llm: LLM, prompt: list[int]) -> float:
        output = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))[0]
        assert output.metrics.ttft_s is not None
        return output.metrics.ttft_s

    def decode(self, llm: LLM, prompt: list[int], count: int = 33) -> float:
        """Seconds per token after the first one."""
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        metrics = llm.generate([prompt], params)[0].metrics
        assert metrics.ttft_s is not None
        return (metrics.e2e_s - metrics.ttft_s) / (count - 1)

    def theirs(self, prompt: list[int], count: int) -> float:
        """Seconds of `transformers` generate for `count` greedy tokens."""
        ids = torch.tensor([prompt])
        begin = time.perf_counter()
        self.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - begin

    def throughput(self, llm: LLM, stems: list[list[int]], count: int = 64) -> float:
        """Output tokens a second of requests with these beginnings and an end of its own each."""
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate([stem + self.tokens(NEW_TOKENS) for stem in stems], params)
        return len(stems) * count / (time.perf_counter() - begin)

    def rows(self) -> dict[str, list[float]]:
        rows: dict[str, list[float]] = {}

        def note(name: str, measure: Callable[[], float], scale: float = 1e3) -> None:
            rows.setdefault(name, []).append(measure() * scale)

        self.decode(self.on, self.tokens(64), 4)  # warm up
        self.theirs(self.tokens(64), 2)
        for _ in range(self.repeats):
            for prefix in (128, 512, 2048):
                stem = self.tokens(prefix)
                first, second = stem + self.tokens(NEW_TOKENS), stem + self.tokens(NEW_TOKENS)
                note(f"TTFT cold, {prefix} + {NEW_TOKENS}, ms", lambda p=first: self.ttft(self.on, p))
                note(f"TTFT hit, {prefix} + {NEW_TOKENS}, ms", lambda p=second: self.ttft(self.on, p))
                note(f"TTFT caching off, {prefix} + {NEW_TOKENS}, ms", lambda p=second: self.ttft(self.off, p))
                note(f"TTFT transformers, {prefix} + {NEW_TOKENS}, ms", lambda p=second: self.theirs(p, 1))
            prompt = self.tokens(2048)
            note("decode at 2048, ms a token", lambda p=prompt: self.decode(self.on, p))
            note(
                "decode at 2048, transformers, ms a token",
                lambda p=prompt: (self.theirs(p, 17) - self.theirs(p, 1)) / 16,
            )
            short = self.tokens(16)
            note("decode at 16, ms a token", lambda p=short: self.decode(self.on, p))
            note(
                "decode at 16, transformers, ms a token",
                lambda p=short: (self.theirs(p, 33) - self.theirs(p, 1)) / 32,
            )
        for _ in range(max(1, self.repeats // 2)):
            stem = self.tokens(2048)
            note("8 sharers of 2048, caching off, tok/s", lambda s=stem: self.throughput(self.off, 8 * [s]), 1)
            note("8 sharers of 2048, first, tok/s", lambda s=stem: self.throughput(self.on, 8 * [s]), 1)
            note("8 sharers of 2048, warm, tok/s", lambda s=stem: self.throughput(self.on, 8 * [s]), 1)
            apart = [self.tokens(2048) for _ in range(8)]
            self.throughput(self.on, apart, 1)
            note("8 requests of 2048 apart, warm, tok/s", lambda s=apart: self.throughput(self.on, s), 1)
        for _ in range(3 * self.repeats):  # unique prompts, in turn, for a paired ratio
            prompts = [self.tokens(256) for _ in range(4)]
            note("4 unique prompts of 256 + 8, caching on, ms", lambda p=prompts: self.batch(self.on, p))
            note("4 unique prompts of 256 + 8, caching off, ms", lambda p=prompts: self.batch(self.off, p))
        return rows

    def batch(self, llm: LLM, prompts: list[list[int]]) -> float:
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        return time.perf_counter() - begin

    def control_plane_share(self) -> tuple[float, float]:
        """Share of a step that is not the executor's, on unique prompts: caching on and off."""
        shares = []
        for llm in (self.on, self.off):
            before = llm.stats().times
            for _ in range(self.repeats):
                self.batch(llm, [self.tokens(256) for _ in range(4)])
            after = llm.stats().times
            control = sum(getattr(after, f) - getattr(before, f) for f in ("add_s", "schedule_s", "update_s"))
            shares.append(control / (control + after.execute_s - before.execute_s))
        return shares[0], shares[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.model, args.threads, args.repeats)
    rows = bench.rows()
    on, off = bench.control_plane_share()
    if args.json:
        print(json.dumps({"rows": rows, "control_plane_share": {"on": on, "off": off}}, indent=2))
        return
    for name, values in rows.items():
        print(f"{name:<48}{statistics.median(values):>9.1f}  [{min(values):.1f} - {max(values):.1f}]")
    for prefix in (128, 512, 2048):
        cold, hit = rows[f"TTFT cold, {prefix} + 32, ms"], rows[f"TTFT hit, {prefix} + 32, ms"]
        ratios = [a / b for a, b in zip(cold, hit, strict=True)]
        print(f"cold ÷ hit at {prefix}: {statistics.median(ratios):.1f}  [{min(ratios):.1f} - {max(ratios):.1f}]")
    pairs = zip(*(rows[f"4 unique prompts of 256 + 8, caching {state}, ms"] for state in ("on", "off")), strict=True)
    ratios = [a / b for a, b in pairs]
    print(f"caching on ÷ off without reuse: {statistics.median(ratios):.3f}  [{min(ratios):.3f} - {max(ratios):.3f}]")
    print(f"control plane's share of the time, without reuse: {on:.2%} with caching, {off:.2%} without")


if __name__ == "__main__":
    main()
