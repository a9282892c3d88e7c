"""Where a decoder's weights lie: the kernels' tables of addresses, looked up anew at every step and at little cost.

Knows the columns of `step.run_step`'s tables and the parameters of a decoder; knows nothing of plans and threads.
A parameter put in the place of another is seen at once, and so is one whose memory is another one's now.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_

import numpy as np
import numpy.typing as npt
import torch

from anaphora.runtime.attention import PagedContext
from anaphora.runtime.decoder import Decoder, DecoderLayer, GatedMlp, Norm, NotRecognisedError, Parameters, weight_name
from anaphora.runtime.kernels import step
from anaphora.runtime.kv_cache import KVCache

Int64 = npt.NDArray[np.int64]


class WeightAddresses:
    """The tables of one decoder. Raises NotRecognisedError if a weight is missing.

    A layer without one of the parts that only some decoders have, or a linear part without a bias, has 0 there.
    scales: those of the scales of weights that are codes, see step.run_step; as of the last `now`.
    """

    def __init__(self, decoder: Decoder) -> None:
        num_rows = len(decoder.layers) + 1  # the row behind the layers': last norm, head, head's bias
        size = num_rows * step.NUM_COLUMNS
        self._memory = np.zeros(size + num_rows * (step.DOWN + 1), dtype=np.int64)
        self._table = self._memory[:size].reshape(num_rows, step.NUM_COLUMNS)
        self.scales = self._memory[size:].reshape(num_rows, step.DOWN + 1)
        self._table[:-1, step.ROTARY] = [layer.rotary for layer in decoder.layers]
        self._attention = [layer.attention for layer in decoder.layers]
        self._cache: weakref.ref[KVCache] | None = None

        last, head = num_rows - 1, decoder.head
        parts = [(row, *linear) for row, layer in enumerate(decoder.layers) for linear in linear_parts(layer)]
        linears = [*parts, (last, 1, head)]
        weights = [(row, *weight) for row, layer in enumerate(decoder.layers) for weight in _weights(layer)]
        weights.append((last, 0, decoder.norm.parameters, "weight"))
        weights += [(row, column, part, weight_name(part)) for row, column, part in linears]
        weights += [(row, column + 1, part, "bias") for row, column, part in linears]
        places = [row * step.NUM_COLUMNS + column for row, column, _, _ in weights]
        coded = [(row, column, part) for row, column, part in (*parts, (last, 0, head)) if "codes" in part]
        places += [size + row * (step.DOWN + 1) + column for row, column, _ in coded]
        self._places = np.array(places)
        self._parameters = [part for *_, part, _ in weights] + [part for *_, part in coded]
        self._names = [name for *_, name in weights] + ["scales"] * len(coded)
        self._take(self._look())

    def _look(self) -> list[torch.Tensor | None]:
        return [*map(dict.get, self._parameters, self._names)]

    def _take(self, found: Sequence[torch.Tensor | None]) -> None:
        """Tensors in the places of `_names`; where none is, the address is 0."""
        if any(tensor is None and name != "bias" for tensor, name in zip(found, self._names, strict=True)):
            raise NotRecognisedError("a weight is missing")
        self._found = found
        self._tensors = [tensor for tensor in found if tensor is not None]
        self._taken = self._places[[tensor is not None for tensor in found]]
        self._memory[self._places] = 0

    def now(self, context: PagedContext) -> tuple[Int64, Int64]:
        """The layers' table [layers, NUM_COLUMNS] and that of norm and head [3], valid until the next call.

        Raises NotRecognisedError if a weight has gone.
        """
        # At every step, of hundreds of tensors, so no line of Python runs for each of them.
        found = self._look()
        if not all(map(is_, found, self._found)):
            self._take(found)
        self._memory[self._taken] = np.fromiter(map(torch.Tensor.data_ptr, self._tensors), np.int64, len(self._taken))
        if self._cache is None or self._cache() is not context.cache:
            self._take_pool(context)
        return self._table[:-1], self._table[-1, :3]

    def _take_pool(self, context: PagedContext) -> None:
        cache = context.cache
        layers = [context.layers[attention.layer_idx] for attention in self._attention]  # type: ignore[index]
        self._table[:-1, [step.KEY_POOL, step.VALUE_POOL]] = cache.addresses[layers]
        self._table[:-1, step.GROUP] = [cache.layers[layer].group for layer in layers]
        self._cache = weakref.ref(cache)


def linear_parts(layer: DecoderLayer) -> list[tuple[int, Parameters]]:
    """Each linear part with its weight's column; its bias has the next one."""
    if not isinstance(layer.mlp, GatedMlp):
        raise NotRecognisedError(f"its MLP is a {type(layer.mlp).__name__}")
    attention = [(step.QUERY, layer.query), (step.KEY, layer.key), (step.VALUE, layer.value)]
    mlp = [(step.GATE, layer.mlp.gate), (step.UP, layer.mlp.up), (step.DOWN, layer.mlp.down)]
    return [*attention, (step.OUTPUT, layer.output), *mlp]


def _weights(layer: DecoderLayer) -> list[tuple[int, Parameters, str]]:
    """What is no part of a linear one: column, parameters, name."""
    norms: list[tuple[int, Norm | None]] = [
        (step.INPUT_NORM, layer.input_norm),
        (step.QUERY_NORM, layer.query_norm),
        (step.KEY_NORM, layer.key_norm),
        (step.ATTENTION_NORM, layer.attention_norm),
        (step.MLP_NORM, layer.mlp_norm),
        (step.MLP_OUT_NORM, layer.mlp_out_norm),
    ]
    weights = [(column, norm.parameters, "weight") for column, norm in norms if norm is not None]
    if layer.sinks is not None:
        weights.append((step.SINKS, layer.attention._parameters, layer.sinks))
    return weights
