"""PEFT's files: what they come to, and that whatever is wrong with them is told, with nothing half loaded."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_world import ATTENTION, MLP, PREFIX, write_adapter
from safetensors.torch import load_file, save_file
from tiny_llama import make_tiny_llama
from transformers import LlamaForCausalLM

from anaphora.errors import AdapterError, AdapterFileError, UnsupportedAdapterError
from anaphora.runtime.lora.files import AdapterReader
from anaphora.runtime.lora.settings import parse_settings
from anaphora.runtime.lora.targets import find_targets

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def read(tiny_llama: LlamaForCausalLM) -> AdapterReader:
    return AdapterReader(tiny_llama, max_rank=8)


@pytest.fixture
def folder(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", tiny_llama, 1)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# -- what is read ------------------------------------------------------------------------------------------------------


def test_every_linear_layer_but_the_head_is_a_target(tiny_llama: LlamaForCausalLM) -> None:
    targets = find_targets(tiny_llama)
    assert sorted({path.rpartition(".")[2] for path in targets}) == sorted(ATTENTION + MLP)
    assert len(targets) == 4 * 7
    assert not any(part._forward_pre_hooks for part in tiny_llama.modules())


def test_routed_experts_and_recurrent_layers_are_no_targets() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    mixtral = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))
    assert sorted(find_targets(mixtral)) == sorted(
        f"model.layers.{index}.self_attn.{name}" for index in range(2) for name in ATTENTION
    )
    lfm2 = Lfm2ForCausalLM(Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"]))
    names = {path.rpartition(".")[2] for path in find_targets(lfm2) if path.startswith("model.layers.0")}
    assert names == {"w1", "w2", "w3"}  # the MLP of the layer, not the projections of the convolution


def test_ranks_scales_and_matrices_are_those_of_the_files(
    tiny_llama: LlamaForCausalLM, read: AdapterReader, tmp_path: Path
) -> None:
    path = write_adapter(
        tmp_path / "a",
        tiny_llama,
        1,
        targets=("q_proj", "v_proj", "up_proj"),
        alpha=12,
        ranks={"v_proj": 2, "up_proj": 3},
        alpha_pattern={"layers.1.mlp.up_proj": 6.0},
    )
    adapter = read(str(path))
    tensors = load_file(path / "adapter_model.safetensors")
    assert adapter.rank == 4 and len(adapter.parts) == 12
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    scales = {"q_proj": 3.0, "v_proj": 6.0, "up_proj": 4.0}
    for name, part in adapter.parts.items():
        scale = 2.0 if name == "model.layers.1.mlp.up_proj" else scales[name.rpartition(".")[2]]
        assert part.layer is tiny_llama.get_submodule(name)
        assert torch.equal(part.down, tensors[f"{PREFIX}{name}.lora_A.weight"].t())
        assert torch.equal(part.up, scale * tensors[f"{PREFIX}{name}.lora_B.weight"].t())


@pytest.mark.parametrize(
    ("fields", "path", "changed"),
    [
        ({"target_modules": ["q_proj"]}, Q0, True),
        ({"target_modules": ["proj"]}, Q0, False),  # a part of a name is no name
        ({"target_modules": ["self_attn.q_proj"]}, Q0, True),
        ({"target_modules": [Q0]}, Q0, True),
        ({"target_modules": [Q0]}, "x." + Q0, True),
        ({"target_modules": r".*\.q_proj"}, Q0, True),
        ({"target_modules": r"q_proj"}, Q0, False),  # an expression is for the whole path
        ({"target_modules": "all-linear"}, Q0, True),
        ({"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}, Q0, False),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}, Q0, True),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, Q0, True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 2]}, Q0, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}, Q0, True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["h"]}, Q0, False),
        ({"target_modules": ["o"], "layers_to_transform": [3]}, "h.7.experts.3.o", True),
        ({"target_modules": ["o"], "layers_to_transform": [3], "layers_pattern": ["h"]}, "h.7.experts.3.o", False),
        ({"target_modules": ["o"], "layers_to_transform": [7], "layers_pattern": ["h"]}, "h.7.experts.3.o", True),
    ],
)
def test_which_layers_a_configuration_names(fields: dict[str, Any], path: str, changed: bool) -> None:
    text = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, **fields})
    assert parse_settings(text, [path]).changes(path) == changed


def test_the_scale_is_alpha_over_the_rank_or_over_its_root() -> None:
    fields = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "target_modules": ["q"]}
    fields |= {"rank_pattern": {"a.q": 4}, "alpha_pattern": {r"b\.q": 32}}
    paths = ["q", "x.a.q", "b.q"]
    plain = parse_settings(json.dumps(fields), paths)
    rooted = parse_settings(json.dumps(fields | {"use_rslora": True}), paths)
    assert [plain.scaling_of(path) for path in paths] == [0.5, 2.0, 2.0]
    assert [rooted.scaling_of(path) for path in paths] == [2.0, 4.0, 8.0]


def reference_digest(folder: Path, scaling: float, dtype: str) -> str:
    """The adapter's identity as docs/hash-format.md specifies it, made anew."""
    tensors = load_file(folder / "adapter_model.safetensors")
    paths = sorted(name[len(PREFIX) : -len(".lora_A.weight")] for name in tensors if name.endswith("A.weight"))
    data = b"anaphora/lora" + struct.pack("<BI", 1, len(paths))
    for path in paths:
        a, b = (tensors[f"{PREFIX}{path}.lora_{half}.weight"] for half in "AB")
        for text in (path, dtype):
            data += struct.pack("<I", len(text)) + text.encode()
        data += struct.pack("<dIII", scaling, a.shape[0], a.shape[1], b.shape[0])
        data += a.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
        data += b.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def test_the_digest_is_that_of_the_specification(read: AdapterReader, folder: Path) -> None:
    assert read(str(folder)).digest == reference_digest(folder, 2.0, "float32")
    half, double = make_tiny_llama().to(torch.bfloat16), make_tiny_llama().to(torch.float64)
    assert AdapterReader(half, max_rank=8)(str(folder)).digest == reference_digest(folder, 2.0, "float32")
    assert AdapterReader(double, max_rank=8)(str(folder)).digest == reference_digest(folder, 2.0, "float64")


def test_the_digest_is_fixed(read: AdapterReader, folder: Path) -> None:
    """A golden vector: docs/hash-format.md shows it, too."""

    def count(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if Q0 not in name:
                del tensors[name]
            else:
                tensors[name] = torch.arange(tensors[name].numel(), dtype=torch.float32).view(tensors[name].shape) / 8

    change_tensors(folder, count)
    change_config(folder, target_modules=[Q0], lora_alpha=6)
    digest = read(str(folder)).digest
    assert digest == "8c8aabe3cc6cda4debdc5e6a1a7fe8ffd932e901997702dc343c640644a00174"
    page = (Path(__file__).parents[2] / "docs" / "hash-format.md").read_text(encoding="utf-8")
    assert f"adapter_counting: {digest}" in page


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"bias": None}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow"),
        ({"a_setting_of_tomorrow": 0}, "a_setting_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": 1}, "init_lora_weights"),
        ({"r": 9}, "max_lora_rank"),
        ({"rank_pattern": {"q_proj": 9}}, "max_lora_rank"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "v_proj", "input_layernorm"]}, "input_layernorm"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(
    read: AdapterReader, folder: Path, fields: dict[str, Any], words: str
) -> None:
    change_config(folder, **fields)
    with pytest.raises(UnsupportedAdapterError, match=words):
        read(str(folder))


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": None, "modules_to_save": [], "layer_replication": None, "a_setting_of_tomorrow": False},
        {"init_lora_weights": True, "task_type": None, "loftq_config": {"x": 1}, "qalora_group_size": 16},
        {"init_lora_weights": "gaussian", "eva_config": {"rho": 2}, "megatron_core": "megatron.core"},
        {"lora_alpha": 8.0, "rank_pattern": None, "layers_pattern": "", "exclude_modules": []},
    ],
)
def test_a_setting_without_effect_changes_nothing(read: AdapterReader, folder: Path, fields: dict[str, Any]) -> None:
    before = read(str(folder)).digest
    change_config(folder, **fields)
    assert read(str(folder)).digest == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 0}, "r must"),
        ({"r": "4"}, "r must"),
        ({"r": True}, "r must"),
        ({"r": None}, "r must"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": math.nan}, "lora_alpha"),
        ({"lora_alpha": math.inf}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": {"q_proj": 1}}, "target_modules"),
        ({"exclude_modules": [""]}, "exclude_modules"),
        ({"layers_to_transform": "0"}, "layers_to_transform"),
        ({"layers_to_transform": [True]}, "layers_to_transform"),
        ({"layers_pattern": [1]}, "layers_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "rank_pattern is not a regular expression"),
        ({"rank_pattern": {"q_proj)|(v_proj": 4}}, "rank_pattern is not a regular expression"),
        ({"target_modules": "q{99999999999}"}, "target_modules is not a regular expression"),
        ({"target_modules": "(" * 4000 + ")" * 4000}, "target_modules has an expression of 8,000 characters"),
        ({"target_modules": "(" * 2000 + ")" * 2000}, "target_modules is not a regular expression"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"target_modules": ["q_proj"]}, "does not name"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "k_proj"),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}, "does not name"),
        ({"r": 5}, "shape"),
        ({"rank_pattern": {"v_proj": 3}}, "shape"),
    ],
)
def test_a_wrong_setting_is_told_by_its_key(
    read: AdapterReader, folder: Path, fields: dict[str, Any], words: str
) -> None:
    change_config(folder, **fields)
    with pytest.raises(AdapterFileError, match=words):
        read(str(folder))


def test_an_expression_that_would_be_matched_for_years_is_refused_in_seconds() -> None:
    """A few characters, and `re` tries every way to cut the path into pieces."""
    endless = "(?:[^.]+[.]?)+!"
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": endless, "exclude_modules": endless}
    fields |= {"rank_pattern": {endless: 4}, "alpha_pattern": {endless: 4}}
    own_s, others_s = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(UnsupportedAdapterError, match="take more than 2 s to match"):
        parse_settings(json.dumps(fields), ["model.layers." + "a" * 100])
    assert time.process_time() - own_s < 1
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - others_s < 4


def test_patterns_have_a_number() -> None:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"]}
    fields |= {"rank_pattern": {f"q{number}": 4 for number in range(4097)}}
    with pytest.raises(UnsupportedAdapterError, match="4,097 patterns, at most 4,096"):
        parse_settings(json.dumps(fields), ["q"])


def rename(old: str, new: str) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def put(name: str, value: Any) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        before = tensors.pop(name, None)
        if value is not None:
            tensors[name] = value(before) if callable(value) else value

    return change


A0, B0 = f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (put(A0, None), AdapterFileError, "lora_A.weight, the other half"),
        (put(B0, None), AdapterFileError, "lora_B.weight, the other half"),
        (put(A0, lambda a: a.t().contiguous()), AdapterFileError, r"shape \[64, 4\]"),
        (put(B0, lambda b: b[:32].contiguous()), AdapterFileError, r"shape \[32, 4\]"),
        (put(A0, lambda a: a.unsqueeze(0)), AdapterFileError, r"shape \[1, 4, 64\]"),
        (put(A0, lambda a: a * math.nan), AdapterFileError, "not finite"),
        (put(B0, lambda b: b * math.inf), AdapterFileError, "not finite"),
        (put(B0, lambda b: b.double() * 1e300), AdapterFileError, "not finite in torch.float32"),
        (put(A0, lambda a: a.to(torch.int32)), AdapterFileError, "torch.int32"),
        (put(f"{PREFIX}{Q0}.lora_magnitude_vector", torch.ones(64)), UnsupportedAdapterError, "magnitude"),
        (put("base_model.model.model.embed_tokens.weight", torch.ones(2, 2)), UnsupportedAdapterError, "embed_tokens"),
        (put(f"{PREFIX}{Q0}.lora_B.bias", torch.ones(64)), UnsupportedAdapterError, "lora_B.bias"),
        (rename("lora_A.weight", "lora_A.default.weight"), UnsupportedAdapterError, "default"),
        (rename("layers.0.", "layers.9."), AdapterFileError, "layers.9.*another model"),
        (rename("model.layers", "transformer.layers"), AdapterFileError, "another model"),
        (lambda tensors: tensors.clear(), AdapterFileError, "no weights"),
    ],
)
def test_wrong_weights_are_told(
    read: AdapterReader, folder: Path, change: Any, kind: type[AdapterError], words: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(kind, match=words):
        read(str(folder))


def broken_folders(folder: Path) -> dict[str, Any]:
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    return {
        "no folder": lambda: [file.unlink() for file in folder.iterdir()] and folder.rmdir(),
        "no config": config.unlink,
        "no weights": weights.unlink,
        "a pickle": lambda: weights.rename(folder / "adapter_model.bin"),
        "cut short": lambda: weights.write_bytes(data[:-1]),
        "cut in the header": lambda: weights.write_bytes(data[:100]),
        "too long": lambda: weights.write_bytes(data + b"x"),
        "empty": lambda: weights.write_bytes(b""),
        "no safetensors": lambda: weights.write_bytes(b"x" * 1000),
        "a header of 2**63 bytes": lambda: weights.write_bytes(struct.pack("<Q", 2**63) + data[8:]),
        "huge weights": lambda: os.truncate(weights, 1 << 40),  # a hole: it takes no room
        "huge config": lambda: os.truncate(config, 1 << 40),
        "a pipe": lambda: (config.unlink(), os.mkfifo(config)),
        "weights in a folder": lambda: (weights.unlink(), weights.mkdir()),
        "config not JSON": lambda: config.write_text("{"),
        "config no object": lambda: config.write_text("[]"),
        "config not UTF-8": lambda: config.write_bytes(b'{"r": "\xff"}'),
        "config too deep": lambda: config.write_text("[" * 100_000),
    }


def test_broken_files_are_told(tiny_llama: LlamaForCausalLM, read: AdapterReader, tmp_path: Path) -> None:
    kinds = list(broken_folders(write_adapter(tmp_path / "sound", tiny_llama, 1)))
    for number, what in enumerate(kinds):
        path = write_adapter(tmp_path / str(number), tiny_llama, 1)
        read(str(path))
        broken_folders(path)[what]()
        kind = UnsupportedAdapterError if what == "a pickle" else AdapterFileError
        with pytest.raises(kind, match=str(path)):
            read(str(path))
            pytest.fail(f"accepted: {what}")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800"])
def test_a_path_that_can_be_none_is_told(read: AdapterReader, name: str) -> None:
    with pytest.raises(AdapterFileError, match="no folder"):
        read(name)


def test_an_adapter_for_a_transposed_layer_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    path = write_adapter(tmp_path / "a", model, 1, targets=("lm_head",))
    change_config(path, target_modules=["c_attn"])
    change_tensors(path, rename("lm_head", "transformer.h.0.attn.c_attn"))
    with pytest.raises(UnsupportedAdapterError, match="Conv1D"):
        AdapterReader(model, max_rank=8)(str(path))
