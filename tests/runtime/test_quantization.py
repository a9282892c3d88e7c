"""Claims: int8 weights are one model of their own, computed exactly, whose K/V never meet those of the full weights."""

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
from anaphora.runtime import int8
from anaphora.runtime.int8 import Int8Embedding, Int8Linear, Int8Weight, dequantize_rows, quantize_rows
from anaphora.runtime.quantization import num_bytes, quantize_int8, stored_weights

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


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **({"num_blocks": 64, "dtype": "float32", "quantization": "int8"} | options))


def ask(llm: LLM, prompt: list[int] = PROMPT, **options: Any) -> Any:
    (output,) = llm.generate([prompt], PARAMS, **options)
    assert output.error is None
    return output


def rounded(module: Any) -> Any:
    """The same class with the matrices that the codes stand for: the untouched layers of `transformers` run it."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("proj.weight", "lm_head.weight")) or module.lm_head.weight is parameter:
                parameter.copy_(dequantize_rows(*quantize_rows(parameter)))
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


def test_a_row_is_codes_times_its_own_scale() -> None:
    weight = torch.tensor([[1.27, -0.5, 0.004, 0.0], [0.0, 0.0, 0.0, 0.0], [-254.0, 3.0, 2.9, 1.0]])
    codes, scales = quantize_rows(weight)
    assert codes.tolist() == [[127, -50, 0, 0], [0, 0, 0, 0], [-127, 2, 1, 0]]
    assert torch.equal(scales, torch.tensor([1.27 / 127, 1.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_number_is_further_off_than_half_a_step(dtype: torch.dtype) -> None:
    weight = (torch.randn(50, 96, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)
    codes, scales = quantize_rows(weight)
    assert scales.dtype == dtype
    exact = codes.double() * scales.double().unsqueeze(1)
    # A scale that its dtype rounds down leaves the largest number of a row up to half a step more.
    limit = (0.5 + 127 * torch.finfo(dtype).eps) * scales.double().unsqueeze(1)
    assert bool(((exact - weight.double()).abs() <= limit).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gives_nothing_finite(bad: float) -> None:
    weight = torch.ones(2, 8)
    weight[0, 3] = bad
    output = int8.linear(torch.ones(1, 8), *quantize_rows(weight))
    assert not bool(output[0, 0].isfinite()) and float(output[0, 1]) == pytest.approx(8.0)


@pytest.mark.parametrize("num_rows", [1, 3, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_codes(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    layer = torch.nn.Linear(70, 41).to(dtype)
    x = (torch.randn(1, num_rows, 70, generator=generator) * 30).to(dtype)  # their sums are beyond float16 in codes
    quantized = Int8Linear(Int8Weight(layer.weight), layer.bias)
    with torch.inference_mode():
        got = quantized(x).double()
    exact = x.double() @ (quantized.codes.double() * quantized.scales.double().unsqueeze(1)).T + layer.bias.double()
    assert float((got - exact.detach()).norm() / exact.detach().norm()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("fast_forward", [True, False])
def test_cached_and_uncached_are_what_transformers_gives_with_the_rounded_weights(
    make_module: Any, folder: Path, fast_forward: bool
) -> None:
    llm = make_llm(folder, fast_forward=fast_forward)
    first, again = ask(llm), ask(llm)
    assert [first.num_cached_tokens, again.num_cached_tokens] == [0, 64]
    reference = rounded(make_module())
    assert max(deviation(reference, first), deviation(reference, again)) < TOLERANCE
    assert deviation(make_module(), first) > APART  # else the test proves nothing


def test_its_root_is_its_own(folder: Path) -> None:
    llm, full = make_llm(folder), make_llm(folder, quantization=None)
    assert [engine.engine.identity["quantization"] for engine in (llm, full)] == ["int8-per-output-1", "none"]
    assert llm.engine.identity | {"quantization": "none"} == full.engine.identity
    assert llm.engine.root == root_digest(llm.engine.identity) != full.engine.root


def test_memory_is_counted(folder: Path, make_module: Any) -> None:
    module = make_module()
    linear = [part for path, part in module.named_modules() if path.endswith("proj") or path == "lm_head"]
    saved = sum(3 * part.weight.numel() - 4 * part.out_features for part in linear)
    full, llm = make_llm(folder, quantization=None).engine.weights_bytes, make_llm(folder).engine.weights_bytes
    assert full == num_bytes(module)
    assert llm == full - saved


@pytest.mark.parametrize("name", [VALUES, "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_new_weights_are_quantized_as_they_come_in(make_module: Any, folder: Path, name: str) -> None:
    llm = make_llm(folder)
    ask(llm)
    root = llm.engine.root
    tensors = {name: make_module().state_dict()[name] * torch.linspace(0.5, 2, 64)}
    assert llm.update_weights(tensors) != root
    output = ask(llm)
    assert output.num_cached_tokens == 0
    reference = make_module()
    reference.load_state_dict(tensors, strict=False)
    assert deviation(rounded(reference), output) < TOLERANCE


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({VALUES.replace("weight", "codes"): torch.zeros(32, 64, dtype=torch.int8)}, "did you mean .*v_proj.weight"),
        ({VALUES: torch.zeros(32, 64, dtype=torch.int8)}, "the model's is torch.float32"),
        ({VALUES: torch.zeros(64, 32)}, "shape"),
    ],
)
def test_what_does_not_fit_the_full_weight_is_refused(folder: Path, tensors: Any, message: str) -> None:
    llm = make_llm(folder)
    with pytest.raises(WeightsError, match=message):
        llm.update_weights(tensors)


def test_an_adapter_is_added_to_the_rounded_model(make_module: Any, folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", make_module(), 1, targets=("q_proj", "down_proj"), alpha=12)
    llm = make_llm(folder)
    llm.load_adapter("a", adapter)
    output = ask(llm, adapter="a")
    assert deviation(merged(rounded(make_module()), adapter), output) < TOLERANCE
    assert deviation(rounded(make_module()), output) > APART


def test_what_is_not_ours_to_change_is_refused() -> None:
    with pytest.raises(ConfigError, match="a loaded model is its owner's: give its folder"):
        LLM(make_tiny_llama(), quantization="int8")
    with pytest.raises(ConfigError, match="quantization must be one of int8, got 'int3'"):
        EngineConfig(model="m", quantization="int3")
    with pytest.raises(ConfigError, match="reproducible needs full weights"):
        EngineConfig(model="m", quantization="int8", reproducible=True)
    module = make_tiny_llama()
    module.config.quantization_config = {"quant_method": "other"}
    with pytest.raises(UnsupportedModelError, match="quantised already: leave quantization"):
        quantize_int8(module)


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
    quantize_int8(module)
    with torch.inference_mode():
        got = module(input_ids=torch.tensor([PROMPT])).logits
        expected = rounded(plain)(input_ids=torch.tensor([PROMPT])).logits
    assert float((got - expected).norm() / expected.norm()) < 1e-4


def test_a_model_that_does_not_survive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "LARGEST_CODE", 2)
    with pytest.raises(UnsupportedModelError, match="gives other results with int8 weights"):
        quantize_int8(make_tiny_llama())


def test_a_scaled_embedding_that_is_tied_stays_scaled_and_tied() -> None:
    module = make("Gemma3TextConfig", "Gemma3ForCausalLM", sliding_window=8, head_dim=16)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    rows = dequantize_rows(*quantize_rows(module.lm_head.weight))
    expected = rows[[3, 5]] * module.model.embed_tokens.embed_scale
    quantize_int8(module)
    assert isinstance(module.model.embed_tokens, Int8Embedding)
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
        quantize_int8(module)
    assert "the head keeps its weights, as they are also a Centred" in caplog.text
    assert module.lm_head.weight is embedding.weight
    assert isinstance(module.model.layers[0].mlp.up_proj, Int8Linear)
