"""Loads a folder in the layout of `save_pretrained`, and says plainly what is wrong with one that cannot be loaded.

Knows `transformers`; runs no code that comes with a model. Knows nothing of names and downloads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from anaphora.errors import ModelFileError, UnsupportedModelError
from anaphora.runtime.sources.quiet import quiet_transformers

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def weight_files(folder: Path) -> list[Path]:
    """The files that `transformers` reads this folder's weights from. Raises ModelFileError if one is missing."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                shards = {str(shard) for shard in json.loads(index.read_text())["weight_map"].values()}
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ModelFileError(f"{index} is broken: get the file again") from error
            if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
                raise ModelFileError(
                    f"{folder} lacks {', '.join(missing)}, named in {index.name}: get the missing files"
                )
            return [folder / shard for shard in sorted(shards)]
    raise ModelFileError(f"{folder} has a config.json and no weights: get its model.safetensors (or pytorch_model.bin)")


def check_folder(folder: Path) -> None:
    """Raise ModelFileError or UnsupportedModelError for what can be seen without loading."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} is not valid JSON ({error}): get the file again") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelFileError(
            f"{path} has no model_type, so `transformers` cannot tell what the model is: get the file again"
        )
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{folder.name} is an encoder-decoder model; use a decoder-only causal LM")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelFileError(f"{path} names no list of architectures, but {architectures!r}: get the file again")
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) | set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    if architectures and not known.intersection(architectures) and "auto_map" not in config:
        raise UnsupportedModelError(
            f"{folder.name} is a {architectures[0]}, which has no causal LM head that this `transformers` knows; use a "
            "model whose config.json names a ...ForCausalLM architecture"
        )
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{file} is broken or cut off ({error}): get the file again") from error


def reads_images(folder: Path) -> bool:
    """Whether the model in a checked folder is loaded as one that reads images: no causal LM by its own name."""
    architectures = set(json.loads((folder / "config.json").read_text()).get("architectures") or ())
    return bool(
        architectures.intersection(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
        and not architectures.intersection(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    )


def load_processor(folder: Path) -> ProcessorMixin | None:
    """What makes tokens and pixels of text and images; None if the model reads none. Raises ModelFileError."""
    if not reads_images(folder):
        return None
    with quiet_transformers():
        try:
            loader: Any = AutoProcessor
            processor: ProcessorMixin = loader.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # as with tokenizers; also without Pillow
            raise ModelFileError(
                f"the processor in {folder} cannot be loaded: {error} (images need the package Pillow: pip "
                "install pillow)"
            ) from error
    return processor


def load_folder(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal LM in a folder, in eval mode. Every weight must be in the files: none is ever made up.

    Raises ModelFileError, UnsupportedModelError.
    """
    check_folder(folder)
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            loader: Any = AutoModelForImageTextToText if reads_images(folder) else AutoModelForCausalLM
            loaded: Any = loader.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except (ImportError, ValueError, KeyError) as error:
            # an unknown model_type, code of the model's own, or a quantisation whose package is absent
            raise UnsupportedModelError(f"`transformers` cannot load {folder}: {error}") from error
        except Exception as error:  # settings that make no sense raise whatever the model's code trips over
            raise ModelFileError(
                f"{folder} cannot be loaded, its files are broken or do not fit together: {error}"
            ) from error
    module, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelFileError(
            f"{folder} lacks {len(missing)} weights, the first is {missing[0]}: get the complete model (is this an "
            "adapter, or a model without its head?)"
        )
    if device.type != "cpu":
        module.to(device)
    model: PreTrainedModel = module.eval()
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder; None if it has no tokenizer files. Raises ModelFileError."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with quiet_transformers():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
            raise ModelFileError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    return tokenizer
