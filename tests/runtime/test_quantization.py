"""Claims: quantised weights are a model of their own, computed exactly, whose K/V never meet the full weights'."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_world import merged, write_adapter
from test_architecture import make
from tiny_llama import ids, make_tiny_llama

from anaphora import LLM, SamplingParams
from anaphora.config import EngineConfig
from anaphora.core.hashing import root_digest
from anaphora.errors import ConfigError, UnsupportedModelError, WeightsError
from anaphora.runtime import quantization
from anaphora.runtime.codes import dequantize, embed, linear, quantize
from anaphora.runtime.quantization import HEAD_BITS, LAYER_BITS, num_bytes, quantize_weights, stored_weights
from anaphora.runtime.quantized_layers import QuantizedEmbedding, QuantizedLinear, StoredWeight

PROMPT = ids(90, 69)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
TOLERANCE, APART = 1e-3, 1e-2
VALUES = "model.layers.0.self_attn.v_proj.weight"


def tied_llama() -> Any:
    module = make_tiny_llama()
    module.lm_head.weight = module.model.embed_tokens.weight
    module.config.tie_word_embeddings = True
    return module


@pytest.fixture(scope="module", params=["untied", "tied"])
def make_module(request: pytest.FixtureRequest) -> Any:
    return {"untied": make_tiny_llama, "tied": tied_llama}[request.param]


@pytest.fixture(scope="module")
def folder(make_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_module().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["int8", "int4"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_llm(folder: Path, form: str | None, **options: Any) -> LLM:
    return LLM(str(folder), **({"num_blocks": 64, "dtype": "float32", "quantization": form} | options))


def ask(llm: LLM, prompt: list[int] = PROMPT, **options: Any) -> Any:
    (output,) = llm.generate([prompt], PARAMS, **options)
    assert output.error is None
    return output


def through_codes(weight: torch.Tensor, bits: int) -> torch.Tensor:
    return dequantize(*quantize(weight, bits), weight.dtype)


def rounded(module: Any, form: str) -> Any:
    """The same class with the matrices that the codes stand for: the untouched layers of `transformers` run it."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if module.lm_head.weight is parameter:
                parameter.copy_(through_codes(parameter, HEAD_BITS))
            elif name.endswith("proj.weight") and parameter.shape[1] % 32 == 0:
                parameter.copy_(through_codes(parameter, LAYER_BITS[form]))
    return module


def deviation(module: Any, output: Any) -> float:
    """The largest difference of a reported log-probability from what `transformers` gives."""
    tokens = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = module(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0].float()
    scores = torch.log_softmax(logits[len(PROMPT) - 1 : -1], dim=-1)
    return max(
        abs(float(scores[place, token]) - entry.logprob)
        for place, entries in enumerate(output.outputs[0].logprobs)
        for token, entry in entries.items()
    )


def test_eight_bits_are_codes_times_a_scale_for_every_32_inputs() -> None:
    weight = torch.zeros(16, 64)
    weight[0, :4] = torch.tensor([127.0, -50.4, 0.6, 0.0])
    weight[0, 32:36] = torch.tensor([-254.0, 3.1, 2.9, 0.9])
    matrix = through_codes(weight, 8)
    assert matrix[0, :4].tolist() == [127.0, -50.0, 1.0, 0.0]
    assert matrix[0, 32:36].tolist() == [-254.0, 4.0, 2.0, 0.0]
    assert not matrix[1:].any()


def test_four_bits_are_codes_times_a_scale_from_a_minimum_on_for_every_32_inputs() -> None:
    weight = torch.full((16, 64), 0.25)
    weight[3, :4] = torch.tensor([-5.0, 10.0, 0.4, -0.6])
    matrix = through_codes(weight, 4)
    assert matrix[3, :5].tolist() == [-5.0, 10.0, 0.0, -1.0, 0.0]
    assert torch.equal(matrix[[0, 4]], weight[[0, 4]])  # where all are equal, the minimum says it


def test_codes_lie_as_the_kernels_read_them() -> None:
    weight = torch.arange(32 * 64).view(32, 64) % 16.0
    codes, scales = quantize(weight, 4)
    assert (codes.shape, scales.shape) == ((2, 2, 4, 16, 4), (2, 2, 2, 16))
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.int16)
    assert int(codes[1, 1, 2, 5, 3]) == 11 | 11 << 4  # of output 21 the inputs 32 + 11 and 32 + 27
    codes, scales = quantize(weight - 8, 8)
    assert (codes.shape, scales.shape) == ((2, 2, 8, 16, 4), (2, 2, 1, 16))
    assert int(codes[1, 1, 6, 5, 3]) == 128 + round(
        3 / float(scales.view(torch.float16)[1, 1, 0, 5])
    )  # of output 21 the input 32 + 27


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_no_number_is_further_off_than_half_a_step(dtype: torch.dtype, bits: int) -> None:
    weight = (torch.randn(48, 96, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)
    codes, scales = quantize(weight, bits)
    exact = dequantize(codes, scales, torch.float64).view(48, 3, 32)
    steps = scales.view(torch.float16)[:, :, 0].double().permute(0, 2, 1).reshape(48, 3, 1)
    limit = (0.5 + 2 ** (bits - 11)) * steps  # a scale or minimum that float16 rounds leaves a little more
    assert bool(((exact - weight.double().view(48, 3, 32)).abs() <= limit).all())
    assert torch.equal(dequantize(codes, scales, dtype), exact.view(48, 96).to(dtype))


def test_four_bits_that_were_four_bits_come_back() -> None:
    """Weights of a file of Q4_1, say, that was converted to bfloat16."""
    generator = torch.Generator().manual_seed(4)
    whole = torch.randint(0, 16, (64, 4, 32), generator=generator)
    whole[:, :, 0], whole[:, :, 1] = 0, 15
    scale = (0.05 + torch.rand(64, 4, 1, generator=generator) / 10).half().float()
    weight = (whole * scale - 7 * scale).view(64, 128).bfloat16()
    codes, _ = quantize(weight, 4)
    nibbles = torch.cat((codes & 15, codes >> 4), dim=2)  # [4, groups, 8, 16, 4]
    assert torch.equal(nibbles.permute(0, 3, 1, 2, 4).reshape(64, 4, 32), whole)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nothing_finite(bad: float, bits: int) -> None:
    weight = torch.ones(16, 32)
    weight[0, 3] = bad
    output = linear(torch.ones(1, 32), *quantize(weight, bits))
    assert not bool(output[0, 0].isfinite()) and float(output[0, 1]) == pytest.approx(32.0, rel=1e-3)


@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_matrix(dtype: torch.dtype, bits: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    layer = torch.nn.Linear(96, 48).to(dtype)
    x = (torch.randn(1, num_rows, 96, generator=generator) * 30).to(dtype)
    quantized = QuantizedLinear(StoredWeight(layer.weight, bits), layer.bias)
    with torch.inference_mode():
        got = quantized(x).double()
    exact = x.double() @ through_codes(layer.weight, bits).double().T + layer.bias.double()
    assert float((got - exact.detach()).norm() / exact.detach().norm()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("bits", [8, 4])
def test_an_embedding_looks_up_rows_of_the_matrix(bits: int) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[0, 17], [47, 17]])
    rows = embed(ids, *quantize(weight, bits), torch.float32)
    assert torch.equal(rows, through_codes(weight, bits)[ids])


@pytest.mark.parametrize("fast_forward", [True, False])
def test_cached_and_uncached_are_what_transformers_gives_with_the_rounded_weights(
    make_module: Any, folder: Path, form: str, fast_forward: bool
) -> None:
    llm = make_llm(folder, form, fast_forward=fast_forward)
    first, again = ask(llm), ask(llm)
    assert [first.num_cached_tokens, again.num_cached_tokens] == [0, 64]
    reference = rounded(make_module(), form)
    assert max(deviation(reference, first), deviation(reference, again)) < TOLERANCE
    assert deviation(make_module(), first) > APART  # else the test proves nothing


def test_its_root_is_its_own(folder: Path, form: str) -> None:
    llm, full = make_llm(folder, form), make_llm(folder, None)
    assert [engine.engine.identity["quantization"] for engine in (llm, full)] == [f"{form}-group-32", "none"]
    assert llm.engine.identity | {"quantization": "none"} == full.engine.identity
    assert llm.engine.root == root_digest(llm.engine.identity) != full.engine.root


def test_memory_is_counted(folder: Path, form: str, make_module: Any) -> None:
    """A number of float32 takes 4 bytes, one of 8 bits 1 + 2 / 32, one of 4 bits 1 / 2 + 4 / 32."""
    module = make_module()
    layers = [part for path, part in module.named_modules() if path.endswith("proj") and part.in_features % 32 == 0]
    saved = sum(part.weight.numel() for part in layers) * (4 - {"int8": 17 / 16, "int4": 5 / 8}[form])
    saved += module.lm_head.weight.numel() * (4 - 17 / 16)
    full, llm = make_llm(folder, None).engine.weights_bytes, make_llm(folder, form).engine.weights_bytes
    assert full == num_bytes(module)
    assert llm == full - saved


@pytest.mark.parametrize("name", [VALUES, "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_new_weights_are_quantized_as_they_come_in(make_module: Any, folder: Path, form: str, name: str) -> None:
    llm = make_llm(folder, form)
    ask(llm)
    root = llm.engine.root
    tensors = {name: make_module().state_dict()[name] * torch.linspace(0.5, 2, 64)}
    assert llm.update_weights(tensors) != root
    output = ask(llm)
    assert output.num_cached_tokens == 0
    reference = make_module()
    reference.load_state_dict(tensors, strict=False)
    assert deviation(rounded(reference, form), output) < TOLERANCE


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {VALUES.replace("weight", "codes"): torch.zeros(2, 2, 4, 16, 4).byte()},
            "did you mean .*v_proj.weight",
        ),
        ({VALUES: torch.zeros(32, 64, dtype=torch.uint8)}, "the model's is torch.float32"),
        ({VALUES: torch.zeros(64, 32)}, "shape"),
    ],
)
def test_what_does_not_fit_the_full_weight_is_refused(folder: Path, form: str, tensors: Any, message: str) -> None:
    llm = make_llm(folder, form)
    with pytest.raises(WeightsError, match=message):
        llm.update_weights(tensors)


LARGEST = {"int8": (65_504 * 127.0, -65_504 * 127.0), "int4": (65_504 * 15.0, -65_504.0)}  # float16 scales, minima


@pytest.mark.parametrize("side", [0, 1])
def test_numbers_that_no_scale_holds_are_refused_whole(make_module: Any, folder: Path, form: str, side: int) -> None:
    llm = make_llm(folder, form)
    ask(llm)
    root = llm.engine.root
    weight = torch.zeros(32, 64)
    for value, message in ((float("nan"), "infinities or NaN"), (LARGEST[form][side] * 1.001, "too large for quant")):
        weight[31, 63] = value
        with pytest.raises(WeightsError, match=f"{VALUES} holds .*{message}"):
            llm.update_weights([("lm_head.weight", torch.zeros(384, 64)), (VALUES, weight)])
        assert llm.engine.root == root
    after = ask(llm)
    assert after.num_cached_tokens == 64
    assert deviation(rounded(make_module(), form), after) < TOLERANCE
    weight[31, 63] = LARGEST[form][side]
    assert llm.update_weights({VALUES: weight}) != root
    assert ask(llm).num_cached_tokens == 0  # and no error


def test_an_adapter_is_added_to_the_rounded_model(make_module: Any, folder: Path, form: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", make_module(), 1, targets=("q_proj", "down_proj"), alpha=12)
    llm = make_llm(folder, form)
    llm.load_adapter("a", adapter)
    output = ask(llm, adapter="a")
    assert deviation(merged(rounded(make_module(), form), adapter), output) < TOLERANCE
    assert deviation(rounded(make_module(), form), output) > APART


def test_what_is_not_ours_to_change_is_refused(form: str) -> None:
    with pytest.raises(ConfigError, match="a loaded model is its owner's: give its folder"):
        LLM(make_tiny_llama(), quantization=form)
    with pytest.raises(ConfigError, match="quantization must be one of int8, int4, got 'int3'"):
        EngineConfig(model="m", quantization="int3")
    with pytest.raises(ConfigError, match="reproducible needs full weights"):
        EngineConfig(model="m", quantization=form, reproducible=True)
    module = make_tiny_llama()
    module.config.quantization_config = {"quant_method": "other"}
    with pytest.raises(UnsupportedModelError, match="quantised already: leave quantization"):
        quantize_weights(module, form)


def test_a_model_without_a_size_for_codes_is_refused(form: str) -> None:
    module = make(
        "LlamaConfig",
        "LlamaForCausalLM",
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=3,
        num_key_value_heads=3,
    )
    with pytest.raises(UnsupportedModelError, match=f"no linear layer whose weights could be {form}: leave"):
        quantize_weights(module, form)


def test_a_layer_whose_size_does_not_fit_keeps_its_weights(caplog: pytest.LogCaptureFixture) -> None:
    module = make_tiny_llama()
    with caplog.at_level(logging.INFO, "anaphora.runtime.quantization"):
        quantize_weights(module, "int4")
    mlp = module.model.layers[2].mlp
    assert isinstance(mlp.up_proj, QuantizedLinear) and type(mlp.down_proj) is torch.nn.Linear
    assert "model.layers.2.mlp.down_proj keeps its weights: (64, 176) is no multiple of (16, 32)" in caplog.text


class Peeking(torch.nn.Module):
    """Multiplies by the weight of a layer that it also calls: what the weight is read as must be the weight."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + x @ self.layer.weight.T) / 2


def test_code_that_reads_a_weight_past_its_layer_gets_the_weight() -> None:
    module, plain = make_tiny_llama(), make_tiny_llama()
    for part in module.model.layers:
        part.mlp.up_proj = Peeking(part.mlp.up_proj)
    quantize_weights(module, "int8")
    with torch.inference_mode():
        got = module(input_ids=torch.tensor([PROMPT])).logits
        expected = rounded(plain, "int8")(input_ids=torch.tensor([PROMPT])).logits
    assert float((got - expected).norm() / expected.norm()) < 1e-4


def test_a_model_that_does_not_survive_is_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(weight: torch.Tensor, bits: int) -> StoredWeight:
        return StoredWeight(weight.roll(1, 0), bits)

    monkeypatch.setattr(quantization, "StoredWeight", spoilt)
    with pytest.raises(UnsupportedModelError, match=f"gives other results with {form} weights"):
        quantize_weights(make_tiny_llama(), form)


def test_a_scaled_embedding_that_is_tied_stays_scaled_and_tied() -> None:
    module = make("Gemma3TextConfig", "Gemma3ForCausalLM", sliding_window=8, head_dim=16)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    rows = through_codes(module.lm_head.weight, HEAD_BITS)
    expected = rows[[3, 5]] * module.model.embed_tokens.embed_scale
    quantize_weights(module, "int8")
    assert isinstance(module.model.embed_tokens, QuantizedEmbedding)
    assert torch.equal(module.model.embed_tokens(torch.tensor([3, 5])), expected)
    assert stored_weights(module)["lm_head.weight"] is stored_weights(module)["model.embed_tokens.weight"]


class Centred(torch.nn.Embedding):
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids) - self.weight.mean(dim=0)


def test_an_embedding_that_does_more_keeps_its_weights_and_the_heads(caplog: pytest.LogCaptureFixture) -> None:
    module = tied_llama()
    embedding = Centred(384, 64)
    embedding.weight = module.lm_head.weight
    module.model.embed_tokens = embedding
    with caplog.at_level(logging.INFO, "anaphora.runtime.quantization"):
        quantize_weights(module, "int8")
    assert "the head keeps its weights, as they are also a Centred" in caplog.text
    assert module.lm_head.weight is embedding.weight
    assert isinstance(module.model.layers[0].mlp.up_proj, QuantizedLinear)
