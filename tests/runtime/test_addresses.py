"""Claims: the kernels' table of addresses names every weight, and what is put in the place of one is seen at once."""

from __future__ import annotations

import pytest
import torch
from test_architecture import make
from tiny_llama import make_tiny_llama

pytest.importorskip("numba")

from anaphora.core.ids import RequestId, TokenId
from anaphora.core.plan import ScheduledRequest
from anaphora.runtime.addresses import WeightAddresses
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.decoder import NotRecognisedError
from anaphora.runtime.inputs import build_inputs
from anaphora.runtime.kernels import step
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.quantization import quantize_weights
from anaphora.runtime.recogniser import recognise

CPU = torch.device("cpu")


def context_of(module) -> PagedContext:  # type: ignore[no-untyped-def]
    layout = inspect_model(module, 64)
    tables = BlockTables(1, 1, 64, 16, CPU)
    tables.append([(0, [[1]])])
    cache = KVCache(layout.places, num_blocks=2, block_size=16, dtype=layout.dtype, device=CPU)
    scheduled = [ScheduledRequest(RequestId("r"), 0, (TokenId(1),), (), True)]
    inputs = build_inputs(scheduled, [0], tables, layout.cache.groups, layout.dtype)
    return PagedContext(cache, layout.layers, inputs.groups)


def test_every_part_has_its_column() -> None:
    module = make("Qwen3Config", "Qwen3ForCausalLM", attention_bias=True, num_hidden_layers=3)
    context = context_of(module)
    table, final = WeightAddresses(recognise(module)).now(context)
    assert table.shape == (3, step.NUM_COLUMNS)
    for number, layer in enumerate(module.model.layers):
        a, attention = layer.self_attn, dict.fromkeys(range(step.NUM_COLUMNS), 0)
        for column, part in (
            (step.QUERY, a.q_proj), (step.KEY, a.k_proj), (step.VALUE, a.v_proj), (step.OUTPUT, a.o_proj),
            (step.GATE, layer.mlp.gate_proj), (step.UP, layer.mlp.up_proj), (step.DOWN, layer.mlp.down_proj),
        ):  # fmt: skip
            attention[column] = part.weight.data_ptr()
            attention[column + 1] = 0 if part.bias is None else part.bias.data_ptr()
        for column, norm in (
            (step.INPUT_NORM, layer.input_layernorm), (step.QUERY_NORM, a.q_norm), (step.KEY_NORM, a.k_norm),
            (step.MLP_NORM, layer.post_attention_layernorm),
        ):  # fmt: skip
            attention[column] = norm.weight.data_ptr()
        attention[step.KEY_POOL] = context.cache.keys[number].data_ptr()
        attention[step.VALUE_POOL] = context.cache.values[number].data_ptr()
        assert table[number].tolist() == [attention[column] for column in range(step.NUM_COLUMNS)]
    assert a.q_proj.bias is not None
    assert final.tolist() == [module.model.norm.weight.data_ptr(), module.lm_head.weight.data_ptr(), 0]


def test_a_weight_put_in_the_place_of_another_is_seen_and_one_that_has_gone_is_told() -> None:
    module = make_tiny_llama()
    addresses, context = WeightAddresses(recognise(module)), context_of(module)
    linear = module.model.layers[1].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
    linear.bias = torch.nn.Parameter(torch.zeros(linear.weight.shape[0]))
    table, _ = addresses.now(context)
    assert table[1, step.UP] == linear.weight.data_ptr()
    assert table[1, step.UP_BIAS] == linear.bias.data_ptr()
    linear.bias = None
    linear.weight.data = torch.zeros_like(linear.weight)  # the same parameter, in other memory
    table, _ = addresses.now(context)
    assert table[1, step.UP] == linear.weight.data_ptr()
    assert table[1, step.UP_BIAS] == 0
    linear.weight = None  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(NotRecognisedError, match="a weight is missing"):
            addresses.now(context)


def test_pools_are_those_of_the_context() -> None:
    module = make_tiny_llama()
    addresses = WeightAddresses(recognise(module))
    for context in (context_of(module), context_of(module)):
        for _ in range(2):
            table, _ = addresses.now(context)
            assert table[:, step.KEY_POOL].tolist() == [keys.data_ptr() for keys in context.cache.keys]
            assert table[:, step.VALUE_POOL].tolist() == [values.data_ptr() for values in context.cache.values]


def test_scales_of_codes_have_the_columns_of_their_weights() -> None:
    module = make("LlamaConfig", "LlamaForCausalLM", head_dim=32, num_hidden_layers=2)
    quantize_weights(module, "int8")
    addresses = WeightAddresses(recognise(module))
    addresses.now(context_of(module))
    layer = module.model.layers[1]
    parts = [layer.self_attn.v_proj, layer.mlp.down_proj]
    assert addresses.scales[1, [step.VALUE, step.DOWN]].tolist() == [part.scales.data_ptr() for part in parts]
    assert addresses.scales[2].nonzero()[0].tolist() == [0]
    assert addresses.scales[2, 0] == module.lm_head.scales.data_ptr()
