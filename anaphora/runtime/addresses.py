"""Where a decoder's weights lie: the kernels' tables of addresses, looked up anew at every step and at little cost.

Knows the columns of `step.run_step`'s tables and the parameters of a decoder; knows nothing of plans and threads.
Nothing but the dictionaries of parameters is kept, so a parameter put in the place of another is seen at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anaphora.runtime.attention import PagedContext
from anaphora.runtime.decoder import Decoder, DecoderLayer, GatedMlp, Norm, NotRecognisedError, Parameters, weight_name
from anaphora.runtime.kernels import step


class WeightAddresses:
    """The tables of one decoder.

    A layer without one of the parts that only some decoders have, or a linear part without a bias, has 0 there.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._attention = [layer.attention for layer in decoder.layers]
        self._table = np.zeros((len(decoder.layers) + 1, step.NUM_COLUMNS), dtype=np.int64)
        self._table[:-1, step.ROTARY] = [layer.rotary for layer in decoder.layers]
        weights = [(row, *weight) for row, layer in enumerate(decoder.layers) for weight in _weights(layer)]
        linears = [(row, *linear) for row, layer in enumerate(decoder.layers) for linear in linear_parts(layer)]
        weights += [(row, column, parameters, weight_name(parameters)) for row, column, parameters in linears]
        biases = [(row, column + 1, parameters) for row, column, parameters in linears]
        # The row behind the layers': last norm, head, head's bias.
        weights += [(-1, 0, decoder.norm.parameters, "weight"), (-1, 1, decoder.head, weight_name(decoder.head))]
        biases.append((-1, 2, decoder.head))
        self._weights = [(parameters, name) for _, _, parameters, name in weights]
        self._weight_places = tuple(np.array([place[:2] for place in weights]).T)
        self._biases = [parameters for _, _, parameters in biases]
        self._bias_places = tuple(np.array([place[:2] for place in biases]).T)

        self._scales = np.zeros((len(decoder.layers) + 1, step.DOWN + 1), dtype=np.int64)
        self._codes = [place for place in (*linears, (-1, 0, decoder.head)) if "codes" in place[2]]

    def scales(self) -> npt.NDArray[np.int64]:
        """Addresses of the scales of weights that are codes: see step.run_step. Valid until the next call."""
        for row, column, parameters in self._codes:
            self._scales[row, column] = parameters["scales"].data_ptr()  # type: ignore[union-attr]
        return self._scales

    def now(self, context: PagedContext) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The layers' table [layers, NUM_COLUMNS] and that of norm and head [3], valid until the next call.

        Raises NotRecognisedError if a weight has gone.
        """
        table, cache = self._table, context.cache
        found: list[Any] = [parameters[name] for parameters, name in self._weights]
        if any(weight is None for weight in found):
            raise NotRecognisedError("a weight is missing")
        table[self._weight_places] = [weight.data_ptr() for weight in found]
        maybe = [parameters.get("bias") for parameters in self._biases]
        table[self._bias_places] = [0 if bias is None else bias.data_ptr() for bias in maybe]
        pools = [context.layers[attention.layer_idx] for attention in self._attention]  # type: ignore[index]
        table[:-1, step.KEY_POOL] = [cache.keys[pool].data_ptr() for pool in pools]
        table[:-1, step.VALUE_POOL] = [cache.values[pool].data_ptr() for pool in pools]
        table[:-1, step.GROUP] = [cache.layers[pool].group for pool in pools]
        return table[:-1], table[-1, :3]


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
