"""Recurrent layers of a `transformers` model, run over a packed batch of sequences that each have a state of their own.

Knows the library's interface between a recurrent layer and its cache (get and update a conv state or a recurrent state,
by layer), which all its linear-attention, state-space and short-convolution layers share; knows nothing of plans. The
library hands a layer one batch with one state; here, each such layer is called once for every sequence of the packed
batch with more than one new token, and once for all that have one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from anaphora.errors import UnsupportedModelError
from anaphora.runtime.attention import Span
from anaphora.runtime.state_cache import StateCache, StateContext, StateKey, StateShape, StateSpan

CACHE_ARGUMENT = "cache"  # of every recurrent layer, by name


def state_context(cache: StateCache | None, sequences: Sequence[Span]) -> StateContext | None:
    """Who moves on in a step of these sequences, which cover the packed batch in order. None without a cache."""
    if cache is None:
        return None
    spans: list[StateSpan] = []
    for span in sequences:
        end, is_fresh = span.begin + span.num_tokens, span.start == 0
        last = spans[-1] if spans else None
        joins = last is not None and last.end - last.begin == len(last.rows) and not last.is_fresh
        if last is not None and joins and span.num_tokens == 1 and not is_fresh:
            spans[-1] = StateSpan(last.begin, end, (*last.rows, span.row))
        else:
            spans.append(StateSpan(span.begin, end, (span.row,), is_fresh))
    return StateContext(cache, tuple(spans))


class _LayerState:
    """What one call of a recurrent layer takes for its cache: the states of the sequences in its batch.

    Layers change a state in place or hand in a new one; both reach the memory in `write_back`.
    """

    def __init__(self, cache: StateCache, rows: Sequence[int], is_fresh: bool) -> None:
        self._states = cache.states
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._is_fresh = is_fresh
        self._mine: dict[StateKey, torch.Tensor] = {}

    def _get(self, key: StateKey) -> torch.Tensor | None:
        if key not in self._mine:
            if self._is_fresh:
                return None
            state = self._states[key]
            self._mine[key] = state.index_select(0, self._rows.to(state.device))
        return self._mine[key]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """New inputs [batch, channels, tokens] of a convolution; returns them with those that it still sees before."""
        key = StateKey(layer_idx, "conv", state_idx)
        width = self._states[key].shape[-1]
        before = self._get(key)
        if before is None:
            inputs = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            inputs = torch.cat([before.to(conv_states.dtype), conv_states], dim=-1)
        self._mine[key] = inputs[..., -width:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._mine[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def write_back(self) -> None:
        for key, mine in self._mine.items():
            state = self._states[key]
            state.index_copy_(0, self._rows.to(state.device), mine.to(state.dtype))


class _Witness:
    """A cache that notes which states a layer keeps in it, and their shapes."""

    def __init__(self) -> None:
        self.shapes: dict[StateKey, StateShape] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        shape = (*conv_states.shape[1:-1], width)
        self.shapes[StateKey(layer_idx, "conv", state_idx)] = StateShape(shape, conv_states.dtype)
        return F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        shape = StateShape(tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        self.shapes[StateKey(layer_idx, "recurrent", state_idx)] = shape
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class RecurrentLayers:
    """The recurrent layers of a module, found in one dry forward of each.

    shapes: every state that they carry; empty if the model has no such layers.
    Raises UnsupportedModelError if a layer's outputs are not those of its own forward when its tokens come in pieces.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.shapes: dict[StateKey, StateShape] = {}
        self._layers: list[torch.nn.Module] = []
        self._one_by_one: set[torch.nn.Module] = set()
        for layer in module.modules():
            if takes_a_state(layer):
                witness = _Witness()
                _call(layer, layer.forward, _probe(module, layer, 2), witness)
                if not witness.shapes:
                    raise UnsupportedModelError(f"{type(layer).__name__} shows no state that could be kept")
                if self.shapes.keys() & witness.shapes.keys():
                    raise UnsupportedModelError(f"{type(layer).__name__} shares its layer_idx with another layer")
                self.shapes |= witness.shapes
                self._layers.append(layer)
        for layer in self._layers:
            self._check(module, layer)

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def switched(self, context: StateContext) -> Iterator[None]:
        """While this lasts, the layers take packed batches and read and write the states of `context`."""
        before = [(layer, vars(layer).get("forward")) for layer in self._layers]
        try:
            for layer in self._layers:
                layer.forward = self._packed(layer, layer.forward, context)
            yield
        finally:
            for layer, forward in before:
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    layer.forward = forward

    def _packed(
        self, layer: torch.nn.Module, forward: Callable[..., Any], context: StateContext
    ) -> Callable[..., torch.Tensor]:
        def run(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            output = torch.empty_like(hidden_states)
            for span in context.spans:
                tokens = hidden_states[0, span.begin : span.end]
                batch = tokens.unsqueeze(1) if len(span.rows) > 1 else tokens.unsqueeze(0)
                result = self._advance(layer, forward, batch, context.cache, span.rows, span.is_fresh)
                output[0, span.begin : span.end] = result.flatten(0, 1)
            return output

        return run

    def _advance(
        self,
        layer: torch.nn.Module,
        forward: Callable[..., Any],
        hidden: torch.Tensor,
        cache: StateCache,
        rows: Sequence[int],
        is_fresh: bool,
    ) -> torch.Tensor:
        """Outputs for hidden [len(rows), tokens, size] of sequences whose states are in `rows`, which move on."""
        pieces: Sequence[torch.Tensor] = [hidden]
        if layer in self._one_by_one and not is_fresh:
            pieces = torch.split(hidden, 1, dim=1)
        outputs = []
        for piece in pieces:
            state = _LayerState(cache, rows, is_fresh)
            outputs.append(_call(layer, forward, piece, state))
            state.write_back()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _check(self, module: PreTrainedModel, layer: torch.nn.Module) -> None:
        """Whether several tokens may follow a state at once. Some classes start from the zero state then, whatever the
        cache holds; they get one token at a time, as when they decode.
        """
        hidden = _probe(module, layer, 11)
        expected = _call(layer, layer.forward, hidden, None)
        for one_by_one in (False, True):
            if one_by_one:
                self._one_by_one.add(layer)
            cache = StateCache(self._shapes_of(layer), num_rows=1, num_slots=0, device=hidden.device)
            first = self._advance(layer, layer.forward, hidden[:, :4], cache, [0], True)
            second = self._advance(layer, layer.forward, hidden[:, 4:9], cache, [0], False)
            third = self._advance(layer, layer.forward, hidden[:, 9:10], cache, [0], False)
            last = self._advance(layer, layer.forward, hidden[:, 10:], cache, [0], False)
            got = torch.cat([first, second, third, last], dim=1)
            error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
            if error <= (1e-4 if hidden.dtype in (torch.float32, torch.float64) else 0.05):
                return
        raise UnsupportedModelError(
            f"{type(layer).__name__} gives other results when its tokens come in pieces (relative error {error:.2g}), "
            "so its state cannot be kept; use another model"
        )

    def _shapes_of(self, layer: torch.nn.Module) -> Mapping[StateKey, StateShape]:
        return {key: shape for key, shape in self.shapes.items() if key.layer_idx == layer.layer_idx}


def takes_a_state(layer: torch.nn.Module) -> bool:
    """A layer that reads or writes recurrent state itself, which its source shows: the calls have no other name."""
    if not isinstance(getattr(layer, "layer_idx", None), int):
        return False
    forward = inspect.unwrap(type(layer).forward)
    return (
        CACHE_ARGUMENT in inspect.signature(forward).parameters
        and {
            "get_conv_state",
            "get_recurrent_state",
        }
        & set(forward.__code__.co_names)
        != set()
    )


def _probe(module: PreTrainedModel, layer: torch.nn.Module, num_tokens: int) -> torch.Tensor:
    """Inputs [1, num_tokens, hidden] that are the same at every load."""
    parameter = next(layer.parameters())
    size = module.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    return torch.randn((1, num_tokens, size), generator=generator).to(parameter.device, parameter.dtype)


def _call(layer: torch.nn.Module, forward: Callable[..., Any], hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    output = forward(hidden, **{CACHE_ARGUMENT: cache})
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result
