"""Loads anything that names or is a causal LM into one `LoadedModel`, and says what exactly the model is.

Knows `transformers`; knows nothing of blocks, plans and requests.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from anaphora.config import DTYPES, QUANTIZATIONS
from anaphora.errors import ConfigError, ModelFileError, UnknownModelError, UnsupportedModelError
from anaphora.runtime.quantization import IDENTITIES, quantize_weights
from anaphora.runtime.sources.converted import recorded_digests
from anaphora.runtime.sources.digests import (
    DigestCache,
    canonical_json,
    config_digest,
    files_digest,
    module_digest,
    tokenizer_digest,
)
from anaphora.runtime.sources.disk import default_cache_dir
from anaphora.runtime.sources.folder import load_folder, load_processor, load_tokenizer, weight_files
from anaphora.runtime.sources.progress import Progress
from anaphora.runtime.sources.resolve import resolve_model

DEFAULT_MAX_MODEL_LEN = 4096
"""Context limit in tokens of a model whose config names none (no learned positions)."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM, ready to run.

    name: built-in name, folder name, file stem, hub id or class name.
    module: in eval mode, on its device, in its dtype.
    tokenizer: None if there is none: then token ids in, token ids out.
    vocab_size: rows of the input embedding; token ids must be below it.
    max_model_len: context limit in tokens.
    eos_token_ids: what ends a text, by the generation config, the config and the tokenizer together.
    identity: what the model is, as plain text: `architecture`, `weights` (digest), `config` (digest), `rope`, `dtype`,
        `quantization`, `tokenizer` (digest). Equal identities compute equal K/V; it holds no path and no name, so a
        copy of a folder has the same identity.
    processor: makes tokens and pixels of text and images; None if the model is run without images.
    """

    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    identity: dict[str, str]
    processor: ProcessorMixin | None = None


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | ProcessorMixin | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str | torch.device | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> LoadedModel:
    """Load a model, fetching and converting it first if it has to be.

    model: a built-in name, a folder, a GGUF file, a hub id, or a loaded `transformers` causal LM. A loaded one is put
        into eval mode and changed in no other way: a dtype or device that it is not in is refused.
    tokenizer: a folder, hub id, loaded tokenizer, or the processor of a loaded model that reads images; None takes the
        model's own, if it has one.
    dtype: `auto` is bfloat16 on CUDA and on CPUs that compute in it, else float32; a loaded model keeps its own.
    quantization: one of QUANTIZATIONS; refused for a loaded model, whose weights are its owner's.
    device: None takes the CPU, or the device of a loaded model.
    cache_dir: None takes $ANAPHORA_CACHE, $XDG_CACHE_HOME/anaphora or ~/.cache/anaphora.
    progress: show on stderr what takes long: bars, or lines where it is no terminal; None shows bars only.

    Raises ConfigError, and the ModelErrors: UnknownModelError, ModelFileError, ChecksumError, FetchError,
    DiskSpaceError, UnsupportedModelError. Nothing half-made is left behind.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}")
    bars = Progress(progress)
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    processor: Any = None
    if isinstance(tokenizer, ProcessorMixin):
        processor, tokenizer = tokenizer, _tokenizer_of(tokenizer)
    if isinstance(model, torch.nn.Module):
        if quantization is not None:
            raise ConfigError(
                "quantization replaces weights, and a loaded model is its owner's: give its folder or name"
            )
        module = _check_module(model, dtype, device)
        name, own_tokenizer, weights = type(module).__name__, None, module_digest(module)
    elif isinstance(model, str | os.PathLike):
        source = resolve_model(model, cache, bars)
        name = source.name
        target = torch_device(device)
        with bars.stage(f"Loading {name}", brief=True):
            module = load_folder(source.folder, torch_dtype(dtype, target), target)
            processor = processor or load_processor(source.folder)
            own_tokenizer = load_tokenizer(source.folder) if tokenizer is None else None
            weights = _weights_digest(source.folder, cache)
        if quantization is not None:
            with bars.stage(f"Quantising the weights of {name} to {quantization}"):
                quantize_weights(module, quantization)
    else:
        raise UnknownModelError(
            f"model must be a name, a path or a `transformers` model, got {type(model).__name__}: see anaphora models"
        )
    chosen = own_tokenizer if tokenizer is None else _resolve_tokenizer(tokenizer, cache, bars)
    template = getattr(processor, "chat_template", None)
    if template and chosen is not None and not chosen.chat_template:
        chosen = copy.copy(chosen)  # the caller's own stays as it is
        chosen.chat_template = template
    return LoadedModel(
        name=name,
        module=module,
        tokenizer=chosen,
        vocab_size=_vocab_size(module),
        max_model_len=_max_model_len(module.config),
        eos_token_ids=_eos_token_ids(module, chosen),
        identity=_identity(module, weights, chosen, quantization),
        processor=processor,
    )


def _tokenizer_of(processor: Any) -> PreTrainedTokenizerBase:
    tokenizer = getattr(processor, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"a {type(processor).__name__} has no tokenizer: give the processor of the model")
    return tokenizer


def torch_device(device: str | torch.device | None) -> torch.device:
    """The device of this name; None is the CPU. Raises ConfigError if it does not exist here."""
    try:
        chosen = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}: use cpu, cuda or cuda:0") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} needs a CUDA GPU and a torch built for it; neither is here: use cpu")
    return chosen


def torch_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype of this name, `auto` resolved for the device."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    computes_bfloat16 = device.type == "cuda" or (device.type == "cpu" and cpu_computes_bfloat16())
    return torch.bfloat16 if computes_bfloat16 else torch.float32


def cpu_computes_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself (AVX512-BF16, AMX, ARM BF16) rather than by way of float32."""
    if hasattr(torch.cpu, "get_capabilities"):
        return any(present is True for name, present in torch.cpu.get_capabilities().items() if "bf16" in name)
    return bool(torch.cpu._is_avx512_bf16_supported())  # before torch 2.10


def _check_module(given: torch.nn.Module, dtype: str, device: str | torch.device | None) -> PreTrainedModel:
    name = type(given).__name__
    if not isinstance(given, PreTrainedModel):
        raise UnsupportedModelError(f"{name} is not a `transformers` model: load it with AutoModelForCausalLM")
    module: Any = given
    if getattr(module.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; use a decoder-only causal LM")
    if module.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no causal LM head: load it with AutoModelForCausalLM")
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) != 1 or "meta" in {one.type for one in devices}:
        raise UnsupportedModelError(f"{name} is spread over {len(devices)} devices or offloaded: put it on one device")
    if dtype != "auto" and module.dtype != torch_dtype(dtype, module.device):
        raise ConfigError(
            f"the loaded model is in {module.dtype} and dtype asks for {dtype}: convert it, or use `auto`"
        )
    if device is not None:
        wanted = torch_device(device)
        if wanted.type != module.device.type or wanted.index not in (None, module.device.index):
            raise ConfigError(
                f"the loaded model is on {module.device} and device asks for {wanted}: move it, or leave device"
            )
    module.eval()
    return given


def _resolve_tokenizer(
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase, cache: Path, bars: Progress
) -> PreTrainedTokenizerBase:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if not isinstance(tokenizer, str | os.PathLike):
        raise ConfigError(f"tokenizer must be a folder, a hub id or a loaded tokenizer, got {type(tokenizer).__name__}")
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        folder = resolve_model(tokenizer, cache, bars, what="tokenizer").folder
    loaded = load_tokenizer(folder)
    if loaded is None:
        raise UnknownModelError(f"there is no tokenizer in {tokenizer}: give a folder with a tokenizer.json")
    return loaded


def _weights_digest(folder: Path, cache: Path) -> str:
    recorded = recorded_digests(folder)
    return files_digest(recorded or DigestCache(cache / "digests").digests(weight_files(folder)))


def _vocab_size(module: PreTrainedModel) -> int:
    embedding: Any = module.get_input_embeddings()
    return int(embedding.num_embeddings)


def _max_model_len(config: PreTrainedConfig) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else DEFAULT_MAX_MODEL_LEN


def _eos_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    holders: tuple[Any, ...] = (module.generation_config, module.config.get_text_config(), module.config, tokenizer)
    found: set[int] = set()
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        values = value if isinstance(value, list | tuple) else [value]
        for token in values:
            if isinstance(token, int) and not isinstance(token, bool):
                found.add(token)
            elif token is not None:
                raise ModelFileError(f"the model's eos_token_id must be token ids, got {value!r}: mend its config")
    return frozenset(found)


def _identity(
    module: PreTrainedModel, weights: str, tokenizer: PreTrainedTokenizerBase | None, form: str | None
) -> dict[str, str]:
    """form: of weights that the engine has quantised."""
    config = module.config
    text_config = json.loads(config.get_text_config().to_json_string(use_diff=False))
    rope = {
        key: value for key, value in text_config.items() if key.startswith("rope") or key == "partial_rotary_factor"
    }
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    return {
        "architecture": type(module).__name__,
        "weights": weights,
        "config": config_digest(config),
        "rope": canonical_json(rope),
        "dtype": str(module.dtype).removeprefix("torch."),
        "quantization": IDENTITIES[form] if form else "none" if quantization is None else canonical_json(quantization),
        "tokenizer": tokenizer_digest(tokenizer),
    }
