"""Several adapters in one layer: each packed token gets its own one's part, exactly; the layer stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anaphora.runtime.lora.adapter import Adapter, LowRankPair, make_adapter
from anaphora.runtime.lora.context import AdapterContext, AdapterStacks


class Inputs:
    """The part of StepInputs that is asked for."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.spans = spans
        self.input_ids = torch.zeros((1, max(end for _, end in spans)), dtype=torch.int64)


def random_adapter(seed: int, layers: dict[str, torch.nn.Linear], rank: int, scaling: float = 0.5) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    return make_adapter(
        {
            path: LowRankPair(
                layer,
                torch.randn((rank, layer.in_features), generator=generator),
                torch.randn((layer.out_features, rank), generator=generator),
                scaling,
            )
            for path, layer in layers.items()
        }
    )


@pytest.fixture
def layers() -> dict[str, torch.nn.Linear]:
    torch.manual_seed(0)
    return {"one": torch.nn.Linear(6, 5), "two": torch.nn.Linear(6, 7, bias=False)}


@torch.inference_mode()
def test_each_token_gets_the_part_of_its_own_adapter(layers: dict[str, torch.nn.Linear]) -> None:
    a, b = random_adapter(1, layers, 2), random_adapter(2, {"one": layers["one"]}, 3, scaling=4.0)
    # The plan's order is not that of the packed batch: spans say where a request's tokens stand.
    context: Any = AdapterStacks().context([b, None, a, b], Inputs([(4, 7), (2, 4), (1, 2), (0, 1)]))
    tokens = torch.randn((1, 7, 6))
    owners = [b, a, None, None, b, b, b]
    before = {name: layer(tokens) for name, layer in layers.items()}
    with context.switched():
        given = {name: layer(tokens) for name, layer in layers.items()}
    for name, layer in layers.items():
        assert torch.equal(layer(tokens), before[name]) and "forward" not in vars(layer)
        for row, owner in enumerate(owners):
            expected = before[name][0, row].clone()
            if owner is not None and name in owner.parts:
                expected += tokens[0, row] @ owner.parts[name].down @ owner.parts[name].up
                assert float((expected - before[name][0, row]).abs().max()) > 0.01
                assert torch.allclose(given[name][0, row], expected, atol=1e-5)
            else:
                assert torch.equal(given[name][0, row], expected)


@torch.inference_mode()
def test_an_adapter_that_overflows_hurts_its_own_tokens_only(layers: dict[str, torch.nn.Linear]) -> None:
    sound, huge = random_adapter(1, layers, 2), random_adapter(2, layers, 2)
    for part in huge.parts.values():
        part.down.mul_(1e38)
    context: Any = AdapterStacks().context([sound, huge, None], Inputs([(0, 1), (1, 2), (2, 3)]))
    with context.switched():
        results = layers["one"](torch.full((1, 3, 6), 100.0))[0]
        layers["two"](torch.ones((1, 3, 6)))
    assert results.isfinite().all(dim=-1).tolist() == [True, False, True]


def test_a_step_without_adapters_has_no_context(layers: dict[str, torch.nn.Linear]) -> None:
    assert AdapterStacks().context([None, None], Inputs([(0, 1), (1, 2)])) is None  # type: ignore[arg-type]


def test_a_stack_serves_until_the_adapters_of_a_step_are_others(layers: dict[str, torch.nn.Linear]) -> None:
    a, b = random_adapter(1, layers, 2), random_adapter(2, layers, 2)
    stacks, inputs = AdapterStacks(), Inputs([(0, 1), (1, 2)])

    def layers_of(adapters: list[Adapter | None]) -> Any:
        context = stacks.context(adapters, inputs)  # type: ignore[arg-type]
        assert context is not None
        return context.layers

    both = layers_of([a, b])
    assert layers_of([b, a]) is both
    assert layers_of([a, None]) is not both
    again = layers_of([a, b])
    stacks.clear()
    assert layers_of([a, b]) is not again


@torch.inference_mode()
def test_an_owners_own_forward_comes_back_whatever_happens(layers: dict[str, torch.nn.Linear]) -> None:
    own = lambda inputs: torch.zeros((1, 2, 5))  # noqa: E731
    layers["one"].forward = own  # type: ignore[method-assign, assignment]
    context = AdapterContext((random_adapter(1, layers, 2),), torch.tensor([0, -1]), AdapterStacks())
    with pytest.raises(KeyError), context.switched():
        assert layers["one"].forward is not own
        raise KeyError
    assert layers["one"].forward is own and "forward" not in vars(layers["two"])


@pytest.mark.parametrize("shape", [(1, 3, 6), (2, 6), (2, 1, 6)])
def test_a_layer_that_sees_other_rows_than_the_tokens_is_refused(
    layers: dict[str, torch.nn.Linear], shape: tuple[int, ...]
) -> None:
    context = AdapterContext((random_adapter(1, layers, 2),), torch.tensor([0, -1]), AdapterStacks())
    with pytest.raises(RuntimeError, match="2 tokens once"), context.switched():
        layers["one"](torch.zeros(shape))
    with pytest.raises(RuntimeError, match="2 tokens once"), context.switched():
        layers["one"](torch.zeros(1, 2, 6))
        layers["one"](torch.zeros(1, 2, 6))
    with pytest.raises(RuntimeError, match="1 layers"), context.switched():
        layers["one"](torch.zeros(1, 2, 6))
