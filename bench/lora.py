"""What LoRA costs: the model itself beside one adapter, and four mixed in every step.

    OMP_WAIT_POLICY=PASSIVE python bench/lora.py [--model smollm2-135m] [--rank 16] [--threads 2] [--repeats 5] [--json]

Where a CPU has no tile unit, large steps with an adapter run through the layers of `transformers`, so the model itself
is measured that way, too.
Prefill of 512 tokens, decoding of one request and of eight, all cold; and the time to read an adapter. Medians, with
the least and the most in brackets. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from anaphora import LLM, SamplingParams
from anaphora.runtime.lora.targets import find_targets
from anaphora.runtime.model import load_model

NUM_ADAPTERS = 4
PREFILL_TOKENS = 512
DECODED_TOKENS = 33
BATCH = 8


def write_adapter(folder: Path, targets: dict[str, torch.nn.Linear], rank: int, seed: int) -> Path:
    """Random matrices for every target, small enough to leave the text sensible."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, layer in targets.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn((rank, layer.in_features), generator=generator)
        b = torch.randn((layer.out_features, rank), generator=generator) * 1e-3
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Bench:
    def __init__(self, model: str, rank: int, threads: int, repeats: int) -> None:
        torch.set_num_threads(threads)
        loaded = load_model(model)
        self.vocab_size, self.repeats = loaded.vocab_size, repeats
        options = {"num_blocks": 1024, "max_num_batched_tokens": PREFILL_TOKENS, "max_lora_rank": max(64, rank)}
        self.fast = LLM(loaded.module, **options)
        self.plain = LLM(loaded.module, fast_forward=False, **options)
        self.read_s: list[float] = []
        self._seed = 0
        targets = find_targets(loaded.module)
        with tempfile.TemporaryDirectory() as root:
            for number in range(NUM_ADAPTERS):
                folder = write_adapter(Path(root) / str(number), targets, rank, number)
                begin = time.perf_counter()
                info = self.fast.load_adapter(str(number), folder)
                self.read_s.append(time.perf_counter() - begin)
        self.adapter_bytes = info.num_bytes

    def tokens(self, count: int) -> list[int]:
        self._seed += 1
        draw = random.Random(self._seed)
        return [draw.randrange(1000, self.vocab_size - 1000) for _ in range(count)]

    def prefill(self, llm: LLM, adapters: list[str | None]) -> float:
        """Milliseconds of one step of 512 tokens, shared evenly."""
        prompts = [self.tokens(PREFILL_TOKENS // len(adapters)) for _ in adapters]
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0), adapter=adapters)
        return 1e3 * (time.perf_counter() - begin)

    def decode(self, llm: LLM, adapters: list[str | None]) -> float:
        """Milliseconds of one step in which each request gains a token."""
        params = SamplingParams(max_tokens=DECODED_TOKENS, temperature=0.0, ignore_eos=True)
        outputs = llm.generate([self.tokens(16) for _ in adapters], params, adapter=adapters)
        seconds = [(o.metrics.e2e_s or 0.0) - (o.metrics.ttft_s or 0.0) for o in outputs]
        return 1e3 * max(seconds) / (DECODED_TOKENS - 1)

    def rows(self) -> dict[str, list[float]]:
        kinds: list[tuple[str, LLM, list[str | None]]] = [
            ("the model itself", self.fast, [None]),
            ("the model itself, transformers' layers", self.plain, [None]),
            ("1 adapter", self.fast, ["0"]),
            ("4 adapters mixed", self.fast, ["0", "1", "2", "3"]),
            ("3 adapters and the model", self.fast, ["0", "1", "2", None]),
        ]
        rows: dict[str, list[float]] = {"reading an adapter": [1e3 * seconds for seconds in self.read_s]}
        for repeat in range(self.repeats + 1):  # the first one warms up
            for name, llm, adapters in kinds:
                measured = {
                    f"prefill {PREFILL_TOKENS}, {name}": self.prefill(llm, adapters),
                    f"decode {BATCH}, {name}": self.decode(llm, adapters * (BATCH // len(adapters))),
                }
                if len(adapters) == 1:
                    measured[f"decode 1, {name}"] = self.decode(llm, adapters)
                for row, value in measured.items() if repeat else ():
                    rows.setdefault(row, []).append(value)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.model, args.rank, args.threads, args.repeats)
    rows = bench.rows()
    if args.json:
        print(json.dumps({"adapter_bytes": bench.adapter_bytes, "rows": rows}, indent=2))
        return
    print(f"an adapter of rank {args.rank} has {bench.adapter_bytes:,} bytes; milliseconds a step:")
    for name in sorted(rows):
        values = rows[name]
        print(f"{name:<56}{statistics.median(values):>9.1f}  [{min(values):.1f} - {max(values):.1f}]")


if __name__ == "__main__":
    main()
