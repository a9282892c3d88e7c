"""Claims: long steps with adapters run in panels, as near to float32 as the library's layers, whatever ranks and parts
the adapters have and whoever shares a panel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_architecture import make
from transformers import PreTrainedModel

pytest.importorskip("numba")

from test_panel_step import Plan, by_panels, needs_tiles, run

from anaphora.runtime.fast_forward import FastForward
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.kernels.panel_adapters import MLP_INPUT
from anaphora.runtime.lora.adapter import Adapter, LowRankPair, make_adapter
from anaphora.runtime.lora.panel_tables import PanelTables
from anaphora.runtime.panel_step import PanelStep
from anaphora.runtime.recogniser import recognise

pytestmark = needs_tiles

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapters(module: PreTrainedModel, *ranks: dict[str, int], size: float = 0.15) -> list[Adapter]:
    """Random ones; each of ranks: of the parts that it changes, in every layer."""
    generator, made = torch.Generator().manual_seed(7), []
    for each in ranks:
        pairs = {}
        for path, layer in module.named_modules():
            if (rank := each.get(path.rpartition(".")[2])) is None or not isinstance(layer, torch.nn.Linear):
                continue
            a = torch.randn(rank, layer.in_features, generator=generator) * size
            b = torch.randn(layer.out_features, rank, generator=generator) * size
            pairs[path] = LowRankPair(layer, a, b, 1.5)
        made.append(make_adapter(pairs))
    return made


def llama() -> PreTrainedModel:
    return make("LlamaConfig", "LlamaForCausalLM", head_dim=32, num_hidden_layers=2)


def count_steps(forward: FastForward) -> list[int]:
    """How many tokens each step has that the panels run."""
    (kernels,), seen = forward._kernels, []
    assert isinstance(kernels, PanelStep)
    run_step = kernels._run

    def noted(*args):  # type: ignore[no-untyped-def]
        seen.append(args[2][0][0].shape[0])
        return run_step(*args)

    kernels._run = noted  # type: ignore[method-assign]
    return seen


MIXED: list[Plan] = [
    [(row, 0, 5) for row in range(6)] + [(6, 0, 40), (7, 0, 300)],  # panels of several adapters, and of none
    [(row, 5, 1) for row in range(6)] + [(6, 40, 17), (8, 0, 64)],
    [(7, 300, 17)],
]


@pytest.mark.parametrize(
    "ranks",
    [
        [dict.fromkeys(PARTS, 16)],
        [{"q_proj": 3, "k_proj": 20, "up_proj": 33}, dict.fromkeys(PARTS, 5), {"down_proj": 1, "v_proj": 40}],
        [{part: 8} for part in PARTS],
    ],
    ids=["one", "three", "each part"],
)
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_every_token_is_as_near_to_float32_as_the_librarys(model: str, ranks: Sequence[dict[str, int]]) -> None:
    if model == "llama":
        module = llama()
    else:  # outputs are normalised before they are added
        module = make("Gemma2Config", "Gemma2ForCausalLM", head_dim=64, num_hidden_layers=2, sliding_window=100)
    made = make_adapters(module, *ranks)
    adapters = {row: made[row % (len(made) + 1)] for row in range(9) if row % (len(made) + 1) < len(made)}
    adapters[7] = made[0]
    without = run(module, PagedForward(module), MIXED)
    truth = run(module, PagedForward(module), MIXED, adapters=adapters)
    module = module.to(torch.bfloat16)
    forward = by_panels(module)
    seen = count_steps(forward)
    ours, theirs = (run(module, each, MIXED, adapters=adapters) for each in (forward, PagedForward(module)))
    assert seen == [370, 87, 17]
    for right, a, b, plain in zip(truth, ours, theirs, without, strict=True):
        for exact, mine, usual, unchanged in zip(right, a, b, plain, strict=True):
            errors, others = ((x.float() - exact).norm(dim=1) / exact.norm(dim=1) for x in (mine, usual))
            assert float(errors.max()) < 1.5 * float(others.max())
            assert float(errors.norm()) < 1.2 * float(others.norm())
            assert float((unchanged - exact).norm() / exact.norm()) > 5 * float(errors.max())  # GUARD


def test_who_shares_a_panel_changes_no_bit() -> None:
    module = llama()
    one, other = make_adapters(module, {"q_proj": 3, "gate_proj": 8}, dict.fromkeys(PARTS, 5))
    forward = by_panels(module.to(torch.bfloat16))
    adapters = {1: one, 2: other}
    together = run(module, forward, [[(0, 0, 21), (1, 0, 21), (2, 0, 21), (3, 0, 2)]], adapters=adapters)[0][1]
    for row in range(3):
        alone = run(module, forward, [[(row, 0, 21), (4, 0, 9)]], adapters=adapters)[0][1]
        assert torch.equal(alone[:21], together[21 * row : 21 * row + 21])


def test_an_adapter_that_overflows_hurts_its_own_request_only() -> None:
    module = llama().to(torch.bfloat16)
    good, bad = make_adapters(module, {"q_proj": 3}, {"o_proj": 3})
    for part in bad.parts.values():
        part.up.fill_(3e38)
        part.down.fill_(3e38)
    forward = by_panels(module)
    seen = count_steps(forward)
    ((_, hidden),) = run(module, forward, [[(0, 0, 21), (1, 0, 30)]], adapters={0: good, 1: bad})
    assert seen == [51]
    assert hidden[:21].isfinite().all()
    assert not hidden[21:].isfinite().any()


def test_an_adapter_that_is_infinite_in_bfloat16_is_not_for_panels_which_others_share() -> None:
    module = llama()
    (adapter,) = make_adapters(module, {"o_proj": 3})
    part = next(iter(adapter.parts.values()))
    part.up[1, 2] = torch.finfo(torch.float32).max
    assert part.up.isfinite().all()
    assert PanelTables(recognise(module))._matrices(adapter) is None


def test_an_adapter_of_another_module_is_not_for_panels() -> None:
    module = llama()
    (adapter,) = make_adapters(module, {"q_proj": 3})
    assert PanelTables(recognise(module))._matrices(adapter) is not None
    assert PanelTables(recognise(llama()))._matrices(adapter) is None


def test_parts_that_read_the_same_numbers_stand_below_each_other() -> None:
    module = llama()
    (adapter,) = make_adapters(module, {"gate_proj": 3, "up_proj": 20})
    made = PanelTables(recognise(module))._matrices(adapter)
    assert made is not None
    assert made.downs[0, MLP_INPUT, 1] == 64  # 16 for rank 3, 32 for rank 20, and what fills up
    assert made.ups[0, -3:, 1:].tolist() == [[0, 32], [0, 64], [0, 0]]
    assert made.tensors[1].shape == (module.config.intermediate_size, 32)


def test_few_sequences_of_one_token_each_are_for_vectors() -> None:
    module = llama().to(torch.bfloat16)
    (adapter,) = make_adapters(module, {"q_proj": 3})
    forward = by_panels(module)
    seen = count_steps(forward)
    singles: list[Plan] = [[(row, 0, 1) for row in range(count)] for count in (16, 17)]
    plans: list[Plan] = [*singles, [(0, 1, 8)], [(0, 9, 7)], [(0, 16, 9), (1, 1, 7)], [(0, 25, 9), (1, 8, 6)]]
    run(module, forward, plans, adapters=dict.fromkeys(range(17), adapter))
    assert seen == [17, 8, 16]
