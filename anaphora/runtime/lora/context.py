"""The adapters of one step side by side: which packed token has which, and how the layers take part.

Knows packed tokens and linear layers; must not know requests or names. However many adapters a step has, each layer
that one of them changes costs two small products more: what the tokens are multiplied with holds the columns of every
adapter, and those of other adapters than a token's own are set to zero in between.

    tokens [T, in] @ [ down 0 | down 1 | ... ] -> [T, ranks], others' columns zero -> @ [ up 0 ; up 1 ; ... ] = [T, out]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from anaphora.runtime.inputs import StepInputs
from anaphora.runtime.lora.adapter import Adapter, AdapterPart
from anaphora.runtime.quantized_layers import LinearLayer


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """The parts of several adapters in one layer. columns: (number of the adapter, its rank here), in order."""

    layer: LinearLayer
    down: torch.Tensor
    up: torch.Tensor
    columns: tuple[tuple[int, int], ...]


def stack(adapters: Sequence[Adapter]) -> tuple[StackedLayer, ...]:
    """Every layer that one of the adapters changes."""
    parts: dict[LinearLayer, list[tuple[int, AdapterPart]]] = {}
    for number, adapter in enumerate(adapters):
        for part in adapter.parts.values():
            parts.setdefault(part.layer, []).append((number, part))
    return tuple(
        StackedLayer(
            layer,
            _joined([part.down for _, part in own], dim=1),
            _joined([part.up for _, part in own], dim=0),
            tuple((number, part.up.shape[0]) for number, part in own),
        )
        for layer, own in parts.items()
    )


def _joined(matrices: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), dim)


class AdapterStacks:
    """Keeps the stack of the latest step that had one: the next one mostly needs it."""

    def __init__(self) -> None:
        self._digests: tuple[str, ...] = ()
        self._layers: tuple[StackedLayer, ...] = ()

    def context(self, adapters: Sequence[Adapter | None], inputs: StepInputs) -> AdapterContext | None:
        """adapters: of each scheduled request. None if none has one."""
        by_digest = {adapter.digest: adapter for adapter in adapters if adapter is not None}
        if not by_digest:
            return None
        ordered = tuple(by_digest[digest] for digest in sorted(by_digest))
        number_of = {adapter.digest: number for number, adapter in enumerate(ordered)}
        numbers = [-1] * inputs.input_ids.shape[1]
        for adapter, (begin, end) in zip(adapters, inputs.spans, strict=True):
            if adapter is not None:
                numbers[begin:end] = [number_of[adapter.digest]] * (end - begin)
        return AdapterContext(ordered, torch.tensor(numbers, device=inputs.input_ids.device), self)

    def of(self, adapters: Sequence[Adapter]) -> tuple[StackedLayer, ...]:
        """The stack of these, in this order."""
        digests = tuple(adapter.digest for adapter in adapters)
        if digests != self._digests:
            self._layers = stack(adapters)
            self._digests = digests
        return self._layers

    def clear(self) -> None:
        """Keep nothing of adapters that may have left memory."""
        self._digests, self._layers = (), ()


@dataclass(frozen=True, slots=True)
class AdapterContext:
    """One step. adapters: of its requests, each once. numbers: [T] int64 on the model's device, the adapter of each
    packed token among these, or -1. stacks: where the layers' stack comes from, when the library's layers run.
    """

    adapters: tuple[Adapter, ...]
    numbers: torch.Tensor
    stacks: AdapterStacks

    @property
    def layers(self) -> tuple[StackedLayer, ...]:
        """What the adapters change, side by side."""
        return self.stacks.of(self.adapters)

    @contextmanager
    def switched(self) -> Iterator[None]:
        """While this lasts, the layers do what the adapters say. Raises RuntimeError if a layer took no part."""
        layers = self.layers
        waiting = {stacked.layer for stacked in layers}
        foreign = {columns: self._foreign(columns) for columns in {stacked.columns for stacked in layers}}
        before = [(stacked.layer, vars(stacked.layer).get("forward")) for stacked in layers]
        try:
            for stacked in layers:
                vars(stacked.layer)["forward"] = _changed(stacked, foreign[stacked.columns], waiting)
            yield
        finally:
            for layer, forward in before:
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    vars(layer)["forward"] = forward
        if waiting:
            raise RuntimeError(f"{len(waiting)} layers that an adapter changes were not called: was the model altered?")

    def _foreign(self, columns: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """[T, ranks]: whether a column is not of the token's own adapter."""
        owners = [number for number, rank in columns for _ in range(rank)]
        return self.numbers.unsqueeze(1) != torch.tensor(owners, device=self.numbers.device)


def _changed(
    stacked: StackedLayer, foreign: torch.Tensor, waiting: set[LinearLayer]
) -> Callable[[torch.Tensor], torch.Tensor]:
    layer, down, up = stacked.layer, stacked.down, stacked.up
    own = layer.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.shape[:-1] != (1, foreign.shape[0]) or layer not in waiting:
            raise RuntimeError(f"an adapted layer must see {foreign.shape[0]} tokens once, got {list(inputs.shape)}")
        waiting.discard(layer)
        outputs = own(inputs)
        # Filled, not multiplied: a token must not suffer from the infinities of an adapter that is not its own.
        narrow = (inputs[0].to(down.dtype) @ down).masked_fill_(foreign, 0.0)
        outputs[0].add_(narrow @ up)
        return outputs

    return forward
