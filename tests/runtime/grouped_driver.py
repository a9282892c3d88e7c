"""Plays the scheduler for models of several groups: gives back every block that a window has passed, and poisons it.

A block without an owner is filled with NaN in every layer, so whatever is read there shows in every later output.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from hand_plans import admit, grouped_part, step
from transformers import PreTrainedModel

from anaphora.core.ids import RequestId, cdiv
from anaphora.core.plan import StepResult
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.executor import TorchExecutor
from anaphora.sampling_params import SamplingParams

SCORED = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
TOLERANCE = 1e-3


class GroupedDriver:
    """tokens: of each request, known so far. tables: its blocks by group, 0 where given back."""

    def __init__(self, module: PreTrainedModel, *, block_size: int, num_blocks: int = 400, max_len: int = 512) -> None:
        self.module, self.block_size = module, block_size
        layout = inspect_model(module, max_len)
        self.kinds = layout.cache.groups
        self.executor = TorchExecutor(
            module,
            layout,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=8,
            dtype=module.dtype,
            device="cpu",
        )
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.most_live = [0] * len(self.kinds)
        self._computed: dict[str, int] = {}
        self._unsent: dict[str, list[list[int]]] = {}
        self._logprobs: dict[str, dict[int, float]] = {}
        self._admitted: list[str] = []
        self._released: list[str] = []
        self._kept: set[str] = set()
        self._owners: Counter[int] = Counter()
        self._free = list(range(1, num_blocks))
        random.Random(0).shuffle(self._free)
        self._poison(self._free)

    def add(self, name: str, tokens: Sequence[int], *, keep: bool = False, like: str = "", hit: int = 0) -> None:
        """A request; its first `hit` tokens, a multiple of the block size, are in the blocks of `like`.

        keep: it gives nothing back, so that others can be like it.
        """
        self.tokens[name], self._computed[name], self._logprobs[name] = list(tokens), hit, {}
        tables: list[list[int]] = [[] for _ in self.kinds]
        if hit:
            for group, kind in enumerate(self.kinds):
                first = kind.first_visible(hit) // self.block_size
                tables[group] = [0] * first + self.tables[like][group][first : hit // self.block_size]
                self._owners.update(block for block in tables[group] if block)
        self.tables[name] = tables
        self._unsent[name] = [list(table) for table in tables]
        self._admitted.append(name)
        if keep:
            self._kept.add(name)

    def run(self, **counts: int) -> StepResult:
        """One step: so many tokens of each request. What is sampled is appended."""
        result = self._step(counts)
        assert result.failed == {}
        for name, count in counts.items():
            request, logprobs = RequestId(name), self._logprobs[name]
            for position, entry in enumerate(result.prompt_logprobs.get(request, ()), self._computed[name] + 1):
                logprobs[position] = entry.logprob
            if request in result.sampled:
                logprobs[len(self.tokens[name])] = result.sampled[request].logprob
                self.tokens[name].append(result.sampled[request].token_id)
            self._computed[name] += count
            self._give_back(name)
        return result

    def check(self) -> None:
        """Every log-probability since the last check against the module's own forward over the request's tokens."""
        for name, logprobs in self._logprobs.items():
            assert logprobs or name in self._kept
            tokens = torch.tensor([self.tokens[name]])
            with torch.inference_mode():
                right = self.module(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(dim=-1)
            for position, logprob in logprobs.items():
                expected = float(right[position - 1, tokens[0, position]])
                assert abs(logprob - expected) < TOLERANCE, (name, position)
            logprobs.clear()

    def run_unchecked(self, name: str, count: int) -> StepResult:
        """One step of one request, which may fail. Nothing is given back."""
        result = self._step({name: count})
        self._computed[name] += count
        return result

    def finish(self, *names: str) -> None:
        """Requests end, checked: all their blocks are given back, and the next plan releases them."""
        self.check()
        for name in names:
            del self._logprobs[name]
            for table in self.tables.pop(name):
                self._release(table)
            self._released.append(name)

    def cover(self, name: str, num_tokens: int) -> None:
        """Blocks for the first so many tokens."""
        for table, unsent in zip(self.tables[name], self._unsent[name], strict=True):
            for _ in range(cdiv(num_tokens, self.block_size) - len(table)):
                block = self._free.pop()
                self._owners[block] += 1
                table.append(block)
                unsent.append(block)

    def written(self, name: str) -> list[set[int]]:
        """For each group, the positions where any of its layers has something."""
        cache, found = self.executor.cache, []
        for group, table in enumerate(self.tables[name]):
            layers = [number for number, layer in enumerate(cache.layers) if layer.group == group]
            found.append(
                {
                    index * self.block_size + offset
                    for index, block in enumerate(table)
                    for offset in range(self.block_size)
                    if any(bool(cache.keys[layer][block, offset].any()) for layer in layers)
                }
            )
        return found

    def _step(self, counts: Mapping[str, int]) -> StepResult:
        parts = []
        for name, count in counts.items():
            start, tokens = self._computed[name], self.tokens[name]
            self.cover(name, start + count)
            new = self._unsent[name]
            self._unsent[name] = [[] for _ in self.kinds]
            parts.append(
                grouped_part(name, start, tokens[start : start + count], new, sample=start + count == len(tokens))
            )
        admitted = [admit(name, self.tokens[name], SCORED) for name in counts if name in self._admitted]
        self._admitted = [name for name in self._admitted if name not in counts]
        released, self._released = self._released, []
        return step(self.executor, *parts, admitted=admitted, released=released)

    def _give_back(self, name: str) -> None:
        for group, (kind, table) in enumerate(zip(self.kinds, self.tables[name], strict=True)):
            if name not in self._kept:
                end = kind.first_visible(self._computed[name]) // self.block_size
                self._release(table[:end])
                table[:end] = [0] * len(table[:end])
                self.most_live[group] = max(self.most_live[group], sum(block > 0 for block in table))

    def _release(self, blocks: Sequence[int]) -> None:
        gone = [block for block in blocks if block]
        self._owners.subtract(gone)
        unowned = [block for block in gone if self._owners[block] == 0]
        self._poison(unowned)
        self._free += unowned  # at the end: given out next

    def _poison(self, blocks: Sequence[int]) -> None:
        for pool in (*self.executor.cache.keys, *self.executor.cache.values):
            pool[torch.tensor(blocks, dtype=torch.int64)] = torch.nan
