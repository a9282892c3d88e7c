"""Decoding alone: ms a token, the share of it outside the model, and what busy neighbours do to it.

    OMP_WAIT_POLICY=PASSIVE python bench/decode.py [--model smollm2-135m] [--threads 2] [--neighbours 1] [--rounds 6]

Each round decodes at 16 and at 2,048 tokens of context with all threads, with one, and with as many as the engine
chooses, in turn; then all of it once more beside so many processes that never rest. Least, median, most. The floor is
what must be read for a token (weights, and keys and values) at the rate at which this machine copies memory.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anaphora import LLM, SamplingParams
from anaphora.runtime.crowding import Crowding
from anaphora.runtime.model import load_model

TOKENS = 17  # of each measurement


class FixedThreads:
    """In the place of a Crowding: so many threads, whatever the neighbours do. shares: what was noted."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.shares: list[float] = []

    def note(self, share: float) -> None:
        self.shares.append(share)


class Bench:
    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.module, self.threads = load_model(model, dtype="bfloat16").module, threads
        self.llm = LLM(self.module, num_blocks=2048)
        self.kernels: Any = self.llm.engine._executor._forward._kernels[-1]  # type: ignore[attr-defined]
        self.draw = random.Random(1)
        self.prompts = {16: self.tokens(16), 2048: self.tokens(2048)}
        for prompt in self.prompts.values():
            self.decode(prompt)

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(1000, 40000) for _ in range(count)]

    def decode(self, prompt: list[int]) -> float:
        """Milliseconds a token after the first."""
        metrics = self.llm.generate([prompt], params(TOKENS))[0].metrics
        assert metrics.ttft_s is not None
        return 1e3 * (metrics.e2e_s - metrics.ttft_s) / (TOKENS - 1)

    def read_bytes(self, context: int) -> int:
        """What a token needs of memory. An embedding is a row, unless it is the head as well."""
        weights = {weight.data_ptr(): weight.nbytes for weight in self.module.parameters()}
        if self.module.get_input_embeddings().weight is not self.module.get_output_embeddings().weight:
            weights.pop(self.module.get_input_embeddings().weight.data_ptr())
        return sum(weights.values()) + context * sum(self.llm.engine.kv_bytes_per_token)

    def rounds(self, count: int, title: str) -> None:
        ways: dict[str, Callable[[], Any]] = {
            f"{self.threads} threads": lambda: FixedThreads(self.threads),
            "1 thread": lambda: FixedThreads(1),
            "as chosen": lambda: chosen,
        }
        chosen = Crowding(self.threads)
        times: dict[tuple[int, str], list[float]] = {}
        shares: list[float] = []
        for _ in range(count):
            for name, way in ways.items():
                self.kernels._crowding = way()
                for context, prompt in self.prompts.items():
                    times.setdefault((context, name), []).append(self.decode(prompt))
                if name == f"{self.threads} threads":
                    shares += self.kernels._crowding.shares
        print(f"{title}: all threads had a core in {statistics.mean(shares):.0%} of their time")
        for (context, name), values in sorted(times.items()):
            print(f"  decode at {context:4}, {name:9} ms a token {spread(values)}")

    def outside(self, num_requests: int, num_steps: int = 32) -> None:
        """Where the time of a step goes that is not the model's."""
        stem = self.prompts[2048]
        prompts = [stem + self.tokens(16) for _ in range(num_requests)]
        self.llm.generate(prompts, params(2))
        before, begin = copy.copy(self.llm.stats().times), time.perf_counter()
        self.llm.generate(prompts, params(num_steps))
        total, after = time.perf_counter() - begin, self.llm.stats().times
        parts = {
            name: getattr(after, f"{name}_s") - getattr(before, f"{name}_s")
            for name in ("schedule", "sample", "update", "output")
        }
        shown = ", ".join(f"{name} {1e3 * value / num_steps:.2f}" for name, value in parts.items())
        share = sum(parts.values()) / total
        print(
            f"{num_requests} requests: {1e3 * total / num_steps:.1f} ms a step, outside the model {share:.1%} ({shown})"
        )


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.1f} [{min(values):.1f} - {max(values):.1f}]"


def copy_bandwidth() -> float:
    """Bytes that are read a second while memory is copied, all threads together."""
    source = torch.zeros(128 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return source.nbytes / min(times)


def rest_never() -> None:
    while True:
        pass


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=rest_never, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    bench = Bench(args.model, args.threads)
    rate = copy_bandwidth()
    for context in bench.prompts:
        size = bench.read_bytes(context)
        print(f"floor at {context}: {size / 1e6:.0f} MB a token, {1e3 * size / rate:.1f} ms at {rate / 1e9:.1f} GB/s")
    bench.rounds(args.rounds, "alone")
    bench.outside(1)
    bench.outside(8)
    if args.neighbours:
        with neighbours(args.neighbours):
            time.sleep(2)
            bench.rounds(args.rounds, f"beside {args.neighbours} busy")


if __name__ == "__main__":
    main()
