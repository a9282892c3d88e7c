"""Claims: steps of many tokens on the tile unit are as near to float32 as the library's, at every border, and a token's
bits do not depend on threads or on what else is in the step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping

import pytest
import torch
from test_architecture import make
from tiny_llama import ids

pytest.importorskip("numba")

from anaphora.core.ids import RequestId, TokenId
from anaphora.core.plan import ScheduledRequest
from anaphora.runtime import panel_step
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.attention import AttentionCall, GroupInputs, PagedContext
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.cpu_step import CpuStep, tiles_allowed
from anaphora.runtime.fast_forward import FastForward, StepKernels, make_forward
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.inputs import build_inputs
from anaphora.runtime.kernels.step import has_tile_unit
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.lora.adapter import Adapter
from anaphora.runtime.lora.context import AdapterStacks
from anaphora.runtime.panel_step import PanelStep
from anaphora.runtime.recogniser import recognise

CPU = torch.device("cpu")
needs_tiles = pytest.mark.skipif(not (has_tile_unit() and tiles_allowed()), reason="no tile unit")

Plan = list[tuple[int, int, int]]
"""Of each scheduled request: its row, where it starts, how many tokens."""


def run(  # type: ignore[no-untyped-def]
    module, forward, plans: list[Plan], block_size: int = 16, adapters: Mapping[int, Adapter] | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and final hidden states of every token of every step. adapters: of rows that have one."""
    layout, num_rows, most = inspect_model(module, 1024), 24, 640
    width = -(-most // block_size)
    num_groups = len(layout.cache.groups)
    tables = BlockTables(num_groups, num_rows, most, block_size, CPU)
    num_blocks = num_groups * num_rows * width
    order = iter((1 + torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))).tolist())
    tables.append([(row, [list(itertools.islice(order, width)) for _ in range(num_groups)]) for row in range(num_rows)])
    cache = KVCache(layout.places, num_blocks=1 + num_blocks, block_size=block_size, dtype=layout.dtype, device=CPU)
    for pool in (*cache.keys, *cache.values):
        pool[1:] = torch.nan  # what nobody wrote must not count; the null block is zero
    results = []
    with torch.inference_mode():
        for plan in plans:
            scheduled = [
                ScheduledRequest(
                    RequestId(str(row)),
                    start,
                    tuple(TokenId(token) for token in ids(row, most)[start : start + count]),
                    (),
                    True,
                )
                for row, start, count in plan
            ]
            inputs = build_inputs(scheduled, [row for row, _, _ in plan], tables, layout.cache.groups, layout.dtype)
            context = PagedContext(cache, layout.layers, inputs.groups)
            keep = torch.arange(inputs.input_ids.shape[1])
            adapted = AdapterStacks().context([(adapters or {}).get(row) for row, _, _ in plan], inputs)
            results.append(forward(inputs.input_ids, inputs.position_ids, keep, context, adapted))
    return results


def by_panels(module) -> FastForward:  # type: ignore[no-untyped-def]
    """Without the kernels for few tokens, which are compiled for every length of a head."""
    decoder, config = recognise(module), module.config
    sizes = config.num_attention_heads, config.num_key_value_heads
    kinds = inspect_model(module, 1024).cache.groups
    few = CpuStep(decoder, *sizes, kinds)
    return FastForward(module, decoder, [PanelStep(decoder, *sizes, few, kinds)])


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_step, "MIN_TOKENS", 1)
    monkeypatch.setattr(panel_step, "MIN_MEAN_TOKENS", 1)


BORDERS: list[list[Plan]] = [
    [[(0, 0, 15), (1, 0, 16), (2, 0, 17), (3, 0, 1)], [(0, 15, 1), (1, 16, 1), (2, 17, 33), (3, 1, 31)]],
    [[(0, 0, 255), (1, 0, 256), (2, 0, 257)], [(0, 255, 1), (1, 256, 1), (2, 257, 255), (3, 0, 40)]],
    [[(0, 0, 500)], [(0, 500, 12)], [(0, 512, 1)], [(0, 513, 70)]],
    [[(0, 0, 630)], [(0, 630, 9), (1, 0, 3)]],
    [[(row, 0, 3) for row in range(20)], [(row, 3, 1) for row in range(20)] + [(20, 0, 300)]],
]


TYPES = ["sliding_attention", "sliding_attention", "full_attention"]


@needs_tiles
@pytest.mark.parametrize("plans", BORDERS)
@pytest.mark.parametrize(
    ("config_name", "settings", "block_size"),
    [
        ("LlamaConfig", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}, 16),
        ("Qwen3Config", {"head_dim": 96, "num_key_value_heads": 4}, 3),
        ("Qwen3Config", {"head_dim": 128, "num_key_value_heads": 1}, 64),
        ("MistralConfig", {"head_dim": 64, "sliding_window": 45}, 16),
        ("MistralConfig", {"head_dim": 32, "sliding_window": 270}, 3),
        ("Gemma2Config", {"head_dim": 64, "sliding_window": 100, "query_pre_attn_scalar": 64}, 16),
        ("Gemma3TextConfig", {"head_dim": 256, "sliding_window": 37, "num_hidden_layers": 3, "layer_types": TYPES}, 16),
    ],
)
def test_every_token_is_as_near_to_float32_as_the_librarys(
    config_name: str, settings: dict[str, object], block_size: int, plans: list[Plan], every_step: None
) -> None:
    class_name = config_name.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    module = make(config_name, class_name, **{"num_hidden_layers": 2, **settings})
    module.apply(lambda part: part.bias.data.normal_() if getattr(part, "bias", None) is not None else None)
    truth = run(module, PagedForward(module), plans, block_size)
    module = module.to(torch.bfloat16)
    forward = by_panels(module)
    fast, library = (run(module, each, plans, block_size) for each in (forward, PagedForward(module)))
    for right, ours, theirs in zip(truth, fast, library, strict=True):
        for a, b, c in zip(right, ours, theirs, strict=True):
            errors, usual = ((x.float() - a).norm(dim=1) / a.norm(dim=1) for x in (b, c))
            assert float(errors.max()) < 1.5 * float(usual.max())  # the worst token: one that went wrong shows
            assert float(errors.norm()) < 1.2 * float(usual.norm())


@needs_tiles
def test_a_tokens_bits_depend_on_neither_threads_nor_company(every_step: None) -> None:
    module = make("LlamaConfig", "LlamaForCausalLM", head_dim=32, num_hidden_layers=2).to(torch.bfloat16)
    forward = make_forward(module, inspect_model(module, 1024), fast=True)
    alone = run(module, forward, [[(5, 0, 300)], [(5, 300, 100)], [(5, 400, 220)], [(5, 620, 4)]])
    plans: list[Plan] = [[(1, 0, 37), (5, 0, 300), (2, 0, 1)], [(3, 0, 450), (5, 300, 100)]]
    plans += [[(4, 0, 7), (5, 400, 220)], [(6, 0, 100), (5, 620, 4)]]
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        together = run(module, forward, plans)
        torch.set_num_threads(1)
        # In the packed batch a single token comes first.
        assert torch.equal(together[0][1][38:338], alone[0][1])
        assert torch.equal(together[1][1][450:550], alone[1][1])
        assert torch.equal(together[2][1][7:227], alone[2][1])
        assert torch.equal(together[3][1][100:104], alone[3][1])  # alone, its keys are shared out by spans


@needs_tiles
def test_what_is_not_finite_stays_with_its_request(every_step: None) -> None:
    module = make("LlamaConfig", "LlamaForCausalLM", head_dim=32, num_hidden_layers=2).to(torch.bfloat16)
    mine, others = ids(1, 640), [token for row in (2, 3) for token in ids(row, 640)[:120]]
    place = next(n for n in range(150, 200) if mine[n] not in [*others, *mine[:n]])
    broken = mine[place]
    module.get_input_embeddings().weight.data[broken] = torch.nan
    forward = make_forward(module, inspect_model(module, 1024), fast=True)
    assert isinstance(forward, FastForward)
    assert isinstance(forward._kernels[0], PanelStep)
    ((_, hidden),) = run(module, forward, [[(2, 0, 120), (1, 0, 205), (3, 0, 120)]])
    finite = hidden.isfinite().all(dim=1)
    assert finite[:120].all()
    assert not finite[120 + place : 325].any()  # the broken token and those behind it
    assert finite[325:].all()


@needs_tiles
def test_steps_of_many_tokens_are_its_own() -> None:
    module = make("LlamaConfig", "LlamaForCausalLM", head_dim=32).to(torch.bfloat16)
    layout = inspect_model(module, 1024)
    forward = make_forward(module, layout, fast=True)
    assert isinstance(forward, FastForward)
    many, few = forward._kernels
    cache = KVCache(layout.places, num_blocks=2, block_size=16, dtype=torch.bfloat16, device=CPU)

    def choice(*lengths: int) -> list[bool]:
        ends = itertools.accumulate(lengths)
        calls = tuple(AttentionCall(end - n, end, 1, torch.ones(1), n) for n, end in zip(lengths, ends, strict=True))
        context = PagedContext(cache, layout.layers, (GroupInputs(torch.zeros(0), calls),))
        return [kernels.takes(sum(lengths), context) for kernels in (many, few)]

    assert choice(23) == [False, True]
    assert choice(24) == choice(1, 1, 22) == [True, True]  # the first one that takes it runs it
    assert choice(1, 1, 1, 21) == [False, True]
    assert choice(*[1] * 199, 57) == [False, True]
    assert choice(*[1] * 199, 58) == choice(100_000) == [True, False]


def test_without_a_tile_unit_torch_computes_long_prompts_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(panel_step, "tiles_allowed", lambda: False)
    module = make("LlamaConfig", "LlamaForCausalLM", head_dim=32).to(torch.bfloat16)
    with caplog.at_level(logging.INFO, "anaphora.runtime"):
        forward = make_forward(module, inspect_model(module, 512), fast=True)
    assert isinstance(forward, FastForward)
    kernels: tuple[StepKernels, ...] = forward._kernels
    assert len(kernels) == 1
    assert "computes long prompts by torch, which is slower: this CPU has no tile unit for bfloat16" in caplog.text
