"""The memory of recurrent layers: each running request's working state, and checkpoints of it.

Knows tensors, rows and slots; knows nothing of requests, plans or models. A state is whatever a layer carries from one
token to the next: the last inputs of a convolution, the matrix of a linear attention, the state of a state space.

    one tensor for each state     [ rows: working states )[ slots: checkpoints )
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from anaphora.core.ids import StateSlot


class StateKey(NamedTuple):
    """Names one state of a model: a layer may carry several of either kind."""

    layer_idx: int
    kind: str  # "conv" or "recurrent"
    state_idx: int


class StateShape(NamedTuple):
    """What one sequence's state is: shape without the batch dimension, and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def state_bytes(shapes: Mapping[StateKey, StateShape]) -> int:
    """Bytes of one whole state, and so of one checkpoint."""
    return sum(shape.num_bytes for shape in shapes.values())


class StateCache:
    """Working states [num_rows] and checkpoints [num_slots] of every state in `shapes`.

    A row holds what its last owner left until a checkpoint is loaded into it or a sequence begins there: who begins at
    position 0 starts from the zero state and does not read it.
    """

    def __init__(
        self, shapes: Mapping[StateKey, StateShape], *, num_rows: int, num_slots: int, device: torch.device
    ) -> None:
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.states = {
            key: torch.zeros((num_rows + num_slots, *shape), dtype=dtype, device=device)
            for key, (shape, dtype) in shapes.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    def is_finite(self, row: int) -> bool:
        """Whether a working state holds neither NaN nor infinity."""
        return all(bool(state[row].isfinite().all()) for state in self.states.values())

    def load(self, row: int, slot: StateSlot) -> None:
        """Copy a checkpoint into a working state."""
        self._copy(self.num_rows + slot, row)

    def save(self, row: int, slot: StateSlot) -> None:
        """Copy a working state into a checkpoint."""
        self._copy(row, self.num_rows + slot)

    def _copy(self, source: int, target: int) -> None:
        for state in self.states.values():
            state[target].copy_(state[source])


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Consecutive tokens [begin, end) of the packed batch that are one call of a recurrent layer.

    rows: the working states of its sequences: one with any number of tokens, or several with one token each.
    is_fresh: one sequence that starts at position 0, so that there is no state before it.
    """

    begin: int
    end: int
    rows: tuple[int, ...]
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class StateContext:
    """One step of the recurrent layers: the spans cover the packed batch without gaps, in order."""

    cache: StateCache
    spans: tuple[StateSpan, ...]
