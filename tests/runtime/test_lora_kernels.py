"""Steps of few tokens with adapters run in the kernels, and give what the model with the adapter merged in gives."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_world import ATTENTION, MLP, deviation, is_exact, merged, write_adapter
from tiny_llama import ids, make_tiny_llama
from transformers import LlamaForCausalLM

from anaphora import LLM, SamplingParams
from anaphora.runtime.codes import dequantize, quantize

CpuStep = pytest.importorskip("anaphora.runtime.cpu_step").CpuStep

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
PROMPT = ids(2200, 20)


@pytest.fixture(scope="module")
def module() -> Any:
    return make_tiny_llama()


@pytest.fixture(scope="module")
def folders(module: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter for each linear part alone, and one for all of them with several ranks."""
    root = tmp_path_factory.mktemp("adapters")
    folders = {
        name: write_adapter(root / name, module, seed, targets=(name,), rank=3, alpha=30)
        for seed, name in enumerate(ATTENTION + MLP)
    }
    ranks = {"q_proj": 8, "down_proj": 1}
    folders["all"] = write_adapter(root / "all", module, 9, targets=ATTENTION + MLP, ranks=ranks)
    return folders


def codes_llama() -> Any:
    """Every size is a multiple of 32: what codes ask for."""
    config = make_tiny_llama().config
    config.intermediate_size = 192
    module, generator = LlamaForCausalLM(config).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module


class Steps:
    """An LLM that notes which steps ran in the kernels: (tokens, adapters)."""

    def __init__(self, module: Any, folders: dict[str, Path], **options: Any) -> None:
        self.llm = LLM(module, num_blocks=256, **options)
        for name, folder in folders.items():
            self.llm.load_adapter(name, folder)
        self.forward = self.llm.engine._executor._forward
        self.kernels, self.seen = next(one for one in self.forward._kernels if isinstance(one, CpuStep)), []
        run = self.kernels._run

        def noted(*args: Any) -> Any:
            self.seen.append((args[1].shape[0], 0 if args[6] is None else len(args[6].adapters)))
            return run(*args)

        self.kernels._run = noted


def test_every_linear_part_takes_its_adapters_part(module: Any, folders: dict[str, Path]) -> None:
    steps, names = Steps(module, folders), [None, *folders]
    outputs = steps.llm.generate([PROMPT] * len(names), PARAMS, adapter=names)
    assert steps.seen == [(len(names), len(folders))] * 5  # all but the step of the prompts, in which 180 tokens are
    for name, output in zip(names, outputs, strict=True):
        is_exact(module if name is None else merged(module, folders[name]), output)
        assert name is None or deviation(module, output) > 0.05  # GUARD


def test_a_prompt_of_few_tokens_is_one_for_the_kernels_and_one_of_many_is_not(
    module: Any, folders: dict[str, Path]
) -> None:
    steps, reference = Steps(module, folders, max_num_batched_tokens=16), merged(module, folders["all"])
    (output,) = steps.llm.generate([PROMPT], PARAMS, adapter="all")
    is_exact(reference, output)
    assert steps.seen == [(16, 1), (4, 1), *[(1, 1)] * 5]
    steps = Steps(module, folders, max_num_batched_tokens=17)
    (output,) = steps.llm.generate([PROMPT], PARAMS, adapter="all")
    is_exact(reference, output)
    assert steps.seen == [(3, 1), *[(1, 1)] * 5]


def test_an_adapter_is_added_to_codes(tmp_path: Path) -> None:
    module = codes_llama()
    module.save_pretrained(tmp_path / "model")
    folder = write_adapter(tmp_path / "all", module, 9, targets=ATTENTION + MLP, rank=5)
    steps = Steps(
        str(tmp_path / "model"), {"all": folder}, quantization="int8", dtype="float32", max_num_batched_tokens=16
    )
    outputs = steps.llm.generate([PROMPT] * 2, PARAMS, adapter=[None, "all"])
    assert [tokens for tokens, _ in steps.seen] == [16, 16, 9, 2, 2, 2, 2, 1]
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("proj.weight", "lm_head.weight")):
                weight.copy_(dequantize(*quantize(weight, 8), weight.dtype))
    is_exact(module, outputs[0])
    is_exact(merged(module, folder), outputs[1])
    assert deviation(module, outputs[1]) > 0.05  # GUARD


def test_an_adapter_that_overflows_hurts_its_own_request_only(module: Any, folders: dict[str, Path]) -> None:
    steps = Steps(module, folders, max_num_batched_tokens=16, max_num_seqs=3)
    for part in steps.llm.engine._executor._adapters[steps.llm.engine.adapters[1].digest].parts.values():
        part.up.fill_(math.inf)
    names = [steps.llm.engine.adapters[1].name, "all", None]
    outputs = steps.llm.generate([PROMPT[:5]] * 3, PARAMS, adapter=names)
    assert "finite" in str(outputs[0].error)
    is_exact(merged(module, folders["all"]), outputs[1])
    is_exact(module, outputs[2])


def test_addresses_of_an_adapter_are_forgotten_with_it(module: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """Another adapter may come to lie where an old one lay."""
    steps = Steps(module, {})
    tables = steps.kernels._low_rank._tables
    for seed in range(3):
        folder = write_adapter(tmp_path / str(seed), module, 60 + seed, targets=ATTENTION, strength=0.2)
        steps.llm.load_adapter("x", folder, replace=True)
        (output,) = steps.llm.generate([PROMPT], PARAMS, adapter="x")
        is_exact(merged(module, folder), output)
        gc.collect()
        assert len(tables) <= 2  # the executor hears of a request's end with the next plan
    steps.llm.unload_adapter("x")
    steps.llm.generate([PROMPT], PARAMS)
    gc.collect()
    assert len(tables) == 0


def test_a_model_of_16_bits_takes_adapters_as_the_layers_of_the_library_do(tmp_path: Path) -> None:
    module = make_tiny_llama().to(torch.bfloat16)
    folder = write_adapter(tmp_path / "a", module, 5, targets=ATTENTION + MLP, rank=5, strength=0.2)
    outputs = []
    for fast_forward in (True, False):
        llm = LLM(module, num_blocks=64, max_num_batched_tokens=8, fast_forward=fast_forward)
        llm.load_adapter("a", folder)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        plain, (output,) = llm.generate([PROMPT], params)[0], llm.generate([PROMPT], params, adapter="a")
        outputs.append([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])
    own = [next(iter(entry.values())).logprob for entry in plain.prompt_logprobs[1:]]
    fast, library, own = map(torch.tensor, (*outputs, own))
    assert float((fast - library).abs().mean()) < 0.05
    assert float((own - library).abs().mean()) > 0.5  # GUARD
