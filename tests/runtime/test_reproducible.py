"""Claims: in reproducible mode a request's results have the same bits whatever is cached, chunked, preempted or batched
along with it; what cannot hold that is refused with a typed error, never run another way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_world import write_adapter
from test_architecture import GPT2_SIZES, make
from tiny_llama import ids, make_tiny_llama

pytest.importorskip("numba")

from anaphora import LLM, SamplingParams
from anaphora.core import check_scheduler
from anaphora.core.plan import SampledToken
from anaphora.engine.outputs import RequestOutput
from anaphora.errors import ConfigError, InvalidParameterError, UnsupportedAdapterError, UnsupportedModelError
from anaphora.pooling_params import PoolingParams
from anaphora.runtime import cpu_step
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.cpu_step import CpuStep
from anaphora.runtime.pooling import Pooler
from anaphora.runtime.reproducible import make_reproducible_forward
from anaphora.runtime.sampler import report, row_by_row

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3)


@dataclass(frozen=True)
class Ask:
    """One request, whose results follow from it alone."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


def asks() -> list[Ask]:
    """Beginnings in common that end within and at borders of blocks and chunks, and every way to ask."""
    draw, stem = random.Random(4), ids(1, 520)
    ways = [
        GREEDY,
        replace(GREEDY, temperature=1.0, top_p=0.9, seed=3),
        replace(GREEDY, temperature=0.8, top_k=20, seed=5, n=3),
        replace(GREEDY, presence_penalty=0.5, repetition_penalty=1.1),
        replace(GREEDY, prompt_logprobs=2, max_tokens=2),
        SamplingParams(max_tokens=0, pooling=PoolingParams("mean")),
        SamplingParams(max_tokens=0, pooling=PoolingParams("last")),
    ]
    found = []
    for number, cut in enumerate((0, 1, 15, 16, 17, 40, 255, 256, 257, 300, 511, 512, 513, 120)):
        prompt = (*stem[:cut], *ids(50 + number, draw.choice((1, 2, 16, 31))))
        found += [Ask(prompt, one) for one in ways[number % len(ways)].choices()]
    return found


def results(output: RequestOutput) -> object:
    """All numbers of an answer, to the last bit."""
    scores = [None if entry is None else sorted(entry.items()) for entry in output.prompt_logprobs or ()]
    tokens = [
        (sequence.token_ids, [sorted(entry.items()) for entry in sequence.logprobs or ()])
        for sequence in output.outputs
    ]
    return repr((tokens, scores, output.embedding))


class World:
    """A model, and what each request gives alone on an empty cache."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.asks = asks()
        llm = self.start(max_num_batched_tokens=512)
        self.alone = []
        for ask in self.asks:
            assert llm.engine.reset_prefix_cache()
            llm.engine.add_request("r", list(ask.prompt), ask.sampling)
            self.alone.append(results(self.finish(llm)["r"]))

    def start(self, **options: Any) -> LLM:
        dtype = str(self.module.dtype).removeprefix("torch.")
        return LLM(self.module, **{"num_blocks": 400, "dtype": dtype, "reproducible": True, **options})

    def finish(self, llm: LLM) -> dict[str, RequestOutput]:
        found = {}
        while llm.engine.has_unfinished:
            found.update({step.output.request_id: step.output for step in llm.engine.step() if step.output is not None})
        return found

    def different(self, llm: LLM, seed: int, pace: float) -> list[int]:
        """Requests that give other bits than alone, of all of them in random order, arriving over time."""
        draw, found = random.Random(seed), dict[str, RequestOutput]()
        todo = list(range(len(self.asks)))
        draw.shuffle(todo)
        for turn, number in enumerate(todo):
            llm.engine.add_request(f"{turn} {number}", list(self.asks[number].prompt), self.asks[number].sampling)
            while llm.engine.has_unfinished and draw.random() > pace:
                steps = llm.engine.step()
                found.update({step.output.request_id: step.output for step in steps if step.output is not None})
                check_scheduler(llm.engine._scheduler)
                if draw.random() < 0.1:
                    llm.engine.reset_prefix_cache(preempt_running=True)
        found |= self.finish(llm)
        assert len(found) == len(todo)
        numbers = {name: int(name.split()[1]) for name in found}
        return sorted({numbers[name] for name, each in found.items() if results(each) != self.alone[numbers[name]]})


WORLDS = ("float32", "bfloat16", "bfloat16 without tiles")

CASES = [
    (1, 0.9, {}),
    (2, 0.3, {"max_num_batched_tokens": 37, "long_prefill_token_threshold": 19}),
    (3, 0.5, {"max_num_batched_tokens": 64, "num_blocks": 50, "max_num_seqs": 5}),
    (4, 0.5, {"block_size": 3, "num_blocks": 1500, "max_num_batched_tokens": 130}),
    (5, 0.7, {"enable_prefix_caching": False, "max_num_batched_tokens": 300}),
]


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "float32":
            yield World(make_tiny_llama())
            return
        if "without" in request.param:
            patch.setattr(cpu_step, "tiles_allowed", lambda: False)
        module = make("LlamaConfig", "LlamaForCausalLM", head_dim=32, max_position_embeddings=1024)
        yield World(module.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("world", "seed", "pace", "options"),
    [(name, *case) for name in WORLDS for case in CASES if name == "float32" or case[0] == 3],
    indirect=["world"],
)
def test_the_same_bits_in_any_company(world: World, seed: int, pace: float, options: dict[str, Any]) -> None:
    llm = world.start(**options)
    assert world.different(llm, seed, pace) == []
    counters = llm.stats().counters
    assert counters.num_preemptions > 0 or pace > 0.5
    assert (counters.num_hit_tokens > 0) == options.get("enable_prefix_caching", True)


@pytest.mark.parametrize("world", WORLDS[:2], indirect=True)
def test_the_usual_mode_does_not_promise_it(world: World) -> None:
    """The test above can fail: products of other shapes give other bits."""
    assert world.different(world.start(reproducible=False), 1, 0.9)


@pytest.mark.parametrize("world", WORLDS[:2], indirect=True)
def test_a_grid_that_follows_the_step_is_found_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = cpu_step.cut_into_chunks

    def moved(groups: Any, kinds: Any, positions: Any, block_size: int, chunk_tokens: int) -> Any:
        size = chunk_tokens // 2 if len(positions) > 40 else chunk_tokens
        chunks = cut(groups, kinds, positions, block_size, size)
        return replace(chunks, slots=np.pad(chunks.slots, ((0, 0), (0, chunk_tokens - size)), mode="edge"))

    monkeypatch.setattr(cpu_step, "cut_into_chunks", moved)
    assert world.different(world.start(), 1, 0.9)


@pytest.mark.parametrize(
    ("config_name", "class_name", "settings", "reason"),
    [
        ("GPT2Config", "GPT2LMHeadModel", GPT2_SIZES, "GPT2Model has no embed_tokens, layers, norm, rotary_emb"),
        ("MistralConfig", "MistralForCausalLM", {"sliding_window": 20}, "layers that do not see every earlier token"),
    ],
)
def test_other_models_are_refused(config_name: str, class_name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"cannot be run reproducibly: .*{reason}.*; leave the option"):
        LLM(make(config_name, class_name, **settings), num_blocks=64, reproducible=True)


def test_kernels_that_give_a_row_other_bits_beside_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CpuStep.__call__

    def careless(self: CpuStep, hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, final = run(self, hidden, *rest)
        return logits, torch.nextafter(final, final + 1) if hidden.shape[0] > 1 else final

    monkeypatch.setattr(CpuStep, "__call__", careless)
    module = make_tiny_llama()
    with pytest.raises(UnsupportedModelError, match="give a token other bits beside other tokens"):
        make_reproducible_forward(module, inspect_model(module, 256), max_tokens=64)


def test_what_is_done_to_the_module_later_ends_requests_instead_of_changing_bits() -> None:
    llm = LLM(make_tiny_llama(), num_blocks=64, reproducible=True)
    before = llm.generate([ids(1, 20)], GREEDY)[0].outputs[0]
    handle = llm.engine._executor._forward._decoder.layers[0].attention.register_forward_hook(lambda *_: None)  # type: ignore[attr-defined]
    llm.engine.add_request("r", ids(1, 20), GREEDY)
    (step,) = llm.engine.step()
    assert step.output is not None
    assert step.output.outputs[0].finish_reason == "error"
    assert "cannot be run reproducibly: it has hooks" in str(step.output.error)
    handle.remove()
    assert llm.generate([ids(1, 20)], GREEDY)[0].outputs[0] == before


def test_adapters_and_rows_are_refused(tmp_path: Path) -> None:
    module = make_tiny_llama()
    llm = LLM(module, num_blocks=64, reproducible=True)
    folder = write_adapter(tmp_path / "a", module, seed=1)
    with pytest.raises(UnsupportedAdapterError, match="adapters cannot be run reproducibly"):
        llm.engine.load_adapter("a", folder)
    assert llm.engine.adapters == ()
    with pytest.raises(InvalidParameterError, match="rows of embeddings cannot be computed reproducibly"):
        llm.engine.add_request("r", {"prompt_embeds": torch.randn(5, 64)}, GREEDY)
    assert not llm.engine.has_unfinished


def test_it_needs_the_engines_own_forward_pass() -> None:
    with pytest.raises(ConfigError, match="leave fast_forward on"):
        LLM(make_tiny_llama(), num_blocks=64, reproducible=True, fast_forward=False)


def test_its_blocks_have_names_of_their_own() -> None:
    """K/V that were computed another way are not found."""
    module = make_tiny_llama()
    usual, exact = (LLM(module, num_blocks=64, reproducible=on).engine for on in (False, True))
    assert dict(exact.identity) == dict(usual.identity) | {"arithmetic": "reproducible"}
    assert exact.root != usual.root


def test_a_mean_does_not_depend_on_how_the_prompt_is_cut() -> None:
    rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 100).unsqueeze(1)
    params, found = PoolingParams("mean", normalize=False), set()
    for size in (100, 50, 7, 1):
        pooler = Pooler(params, 100)
        embedding = None
        for begin in range(0, 100, size):
            embedding = pooler.take(begin, rows[begin : begin + size])
        assert embedding is not None
        found.add(embedding.values)
    assert len(found) == 1


def test_a_row_is_reported_alone() -> None:
    shapes = []

    def watched(logits: torch.Tensor, tokens: list[int], num_top: list[int]) -> list[SampledToken]:
        shapes.append((tuple(logits.shape), logits.data_ptr() % 64))
        return report(logits, tokens, num_top)

    logits = torch.randn(3, 97)
    assert row_by_row(watched)(logits, [5, 6, 7], [2, 0, 1]) == report(logits, [5, 6, 7], [2, 0, 1])
    assert shapes == [((1, 97), 0)] * 3
