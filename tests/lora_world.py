"""LoRA adapters as PEFT writes them, and the oracle: a copy of a model with the adapter merged into its weights.

Shares no code with the package: the merge reads the files by itself.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
TOLERANCE = 1e-3


def write_adapter(
    folder: Path,
    module: Any,
    seed: int,
    *,
    targets: Any = ("q_proj", "v_proj"),
    rank: int = 4,
    alpha: float = 8,
    dtype: torch.dtype = torch.float32,
    ranks: dict[str, int] | None = None,
    strength: float = 0.1,
    layers: Sequence[int] | None = None,
    **config: Any,
) -> Path:
    """Random matrices for every linear layer whose name is in targets; ranks: other ranks, by the layer's name."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, layer in module.named_modules():
        name = path.rpartition(".")[2]
        if not isinstance(layer, torch.nn.Linear) or name not in targets:
            continue
        if layers is not None and not any(f".{index}." in path for index in layers):
            continue
        own = (ranks or {}).get(name, rank)
        a = torch.randn((own, layer.in_features), generator=generator) * strength
        b = torch.randn((layer.out_features, own), generator=generator) * strength
        tensors[f"{PREFIX}{path}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = b.to(dtype)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "rank_pattern": ranks or {},
        "lora_dropout": 0.05,
        "inference_mode": True,
        "use_dora": False,
        "modules_to_save": None,
    }
    if layers is not None:
        fields["layers_to_transform"] = list(layers)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def merged(module: Any, folder: Path) -> Any:
    """A copy of the model with weight + scaling * B @ A in each layer that the adapter in this folder has."""
    model = copy.deepcopy(module)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        path = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        alpha = config["lora_alpha"]
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            if re.search(pattern + "$", path):
                alpha = value
        scaling = alpha / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
        layer = model.get_submodule(path)
        with torch.no_grad():
            layer.weight += (scaling * (b.double() @ a.double())).to(layer.weight.dtype)
    return model


def right_logprobs(reference: Any, output: Any) -> torch.Tensor:
    """[outputs, vocab] of one plain forward over an output's own tokens."""
    tokens = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
    with torch.inference_mode():
        logits = reference(input_ids=tokens, use_cache=False).logits[0].float()
    return torch.log_softmax(logits[len(output.prompt_token_ids) - 1 : -1], dim=-1)


def deviation(reference: Any, output: Any) -> float:
    """The largest difference between the log-probabilities of an output's tokens and those of a reference."""
    assert output.error is None, output.error
    right, sequence = right_logprobs(reference, output), output.outputs[0]
    assert sequence.token_ids
    return max(
        abs(entry[token].logprob - float(right[step, token]))
        for step, (token, entry) in enumerate(zip(sequence.token_ids, sequence.logprobs, strict=True))
    )


def is_exact(reference: Any, output: Any) -> None:
    """Every token is the likeliest one by the reference (or nearly tied), with its log-probability."""
    assert deviation(reference, output) < TOLERANCE
    best = right_logprobs(reference, output).topk(2, dim=-1)
    for step, token in enumerate(output.outputs[0].token_ids):
        gap = float(best.values[step, 0] - best.values[step, 1])
        assert token == int(best.indices[step, 0]) or gap < 1e-4
