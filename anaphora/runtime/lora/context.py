"""The adapters of one step: the packed tokens that each of them changes, and how the layers take part.

Knows packed rows and linear layers; must not know requests or names. While `switched` lasts, every layer that some
adapter of the step changes adds to the rows of each adapter what that one says, and leaves all other rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from anaphora.runtime.inputs import StepInputs
from anaphora.runtime.lora.adapter import Adapter, LowRankPair

_Rows = tuple[int, int] | torch.Tensor
"""Packed tokens: [begin, end), or their indices if they do not stand together."""


@dataclass(frozen=True, slots=True)
class AdapterContext:
    """uses: each adapter of the step, and its packed tokens. num_tokens: of the whole step."""

    uses: tuple[tuple[Adapter, _Rows], ...]
    num_tokens: int

    @contextmanager
    def switched(self) -> Iterator[None]:
        """While this lasts, the layers do what the adapters say. Raises RuntimeError if a layer took no part."""
        parts: dict[torch.nn.Linear, list[tuple[LowRankPair, _Rows]]] = {}
        for adapter, rows in self.uses:
            for pair in adapter.pairs.values():
                parts.setdefault(pair.layer, []).append((pair, rows))
        waiting = set(parts)
        before = [(layer, vars(layer).get("forward")) for layer in parts]
        try:
            for layer, changes in parts.items():
                vars(layer)["forward"] = _changed(layer, changes, self.num_tokens, waiting)
            yield
        finally:
            for layer, forward in before:
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    vars(layer)["forward"] = forward
        if waiting:
            raise RuntimeError(f"{len(waiting)} layers that an adapter changes were not called: was the model altered?")


def adapter_context(adapters: Sequence[Adapter | None], inputs: StepInputs) -> AdapterContext | None:
    """Of the adapter of each scheduled request; None if none has one."""
    by_digest = {adapter.digest: adapter for adapter in adapters if adapter is not None}
    if not by_digest:
        return None
    spans: dict[str, list[tuple[int, int]]] = {digest: [] for digest in by_digest}
    for adapter, span in zip(adapters, inputs.spans, strict=True):
        if adapter is not None:
            spans[adapter.digest].append(span)
    ids = inputs.input_ids
    uses = tuple((adapter, _rows(sorted(spans[digest]), ids.device)) for digest, adapter in by_digest.items())
    return AdapterContext(uses, ids.shape[1])


def _rows(spans: Sequence[tuple[int, int]], device: torch.device) -> _Rows:
    begin, end = spans[0][0], spans[-1][1]
    if sum(stop - start for start, stop in spans) == end - begin:
        return begin, end
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def _changed(
    layer: torch.nn.Linear,
    changes: Sequence[tuple[LowRankPair, _Rows]],
    num_tokens: int,
    waiting: set[torch.nn.Linear],
) -> Callable[[torch.Tensor], torch.Tensor]:
    own = layer.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.shape[:-1] != (1, num_tokens) or layer not in waiting:
            raise RuntimeError(f"an adapted layer must see {num_tokens} tokens once, got {list(inputs.shape)}")
        waiting.discard(layer)
        outputs = own(inputs)
        tokens, results = inputs[0], outputs[0]
        for pair, rows in changes:
            if isinstance(rows, tuple):
                narrow = tokens[rows[0] : rows[1]] @ pair.a.t()
                results[rows[0] : rows[1]].addmm_(narrow, pair.b.t(), alpha=pair.scaling)
            else:
                narrow = tokens.index_select(0, rows) @ pair.a.t()
                results.index_copy_(
                    0, rows, torch.addmm(results.index_select(0, rows), narrow, pair.b.t(), alpha=pair.scaling)
                )
        return outputs

    return forward
