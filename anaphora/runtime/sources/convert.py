"""Turns a GGUF file into a folder that `transformers` loads in a second, once, without losing a bit.

The weights are stored as float32: a 4-bit GGUF weight is `scale * level + offset` of 16-bit numbers, which no 16-bit
type holds exactly, and float32 is what `transformers` itself computes from the file. Bfloat16 runs round from there,
once. It costs disk (4 bytes a weight) and no time: the file is mapped, not read.
Knows nothing of names and downloads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from anaphora.errors import AnaphoraError, ModelFileError, UnsupportedModelError
from anaphora.runtime.sources.converted import FORMAT, IDENTITY_FILE
from anaphora.runtime.sources.digests import file_digest
from anaphora.runtime.sources.disk import check_space
from anaphora.runtime.sources.gguf_header import GgufHeader, read_gguf_header
from anaphora.runtime.sources.progress import Progress
from anaphora.runtime.sources.quiet import quiet_transformers

_TOKENIZER_BYTES = 64 * 2**20


def convert_gguf(gguf: Path, folder: Path, gguf_sha256: str, progress: Progress) -> None:
    """Write config, weights, tokenizer and identity of a GGUF file into an existing folder.

    Raises ModelFileError, UnsupportedModelError, DiskSpaceError; OSError where the folder cannot be written. The
    caller removes the folder then.
    """
    header = read_gguf_header(gguf)
    check_space(folder.parent, header.num_parameters * 4 + _TOKENIZER_BYTES)
    location = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    with progress.stage(f"Reading the tokenizer of {gguf.name}"), quiet_transformers():
        tokenizer = _read_tokenizer(location, header, gguf)
    with progress.stage(f"Converting {gguf.name}", 1000) as advance, quiet_transformers(advance):
        module = _read_module(location, gguf)
    with progress.stage(f"Writing {folder.name}"), quiet_transformers():
        module.save_pretrained(folder, max_shard_size="1TB")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        _write_identity(folder, gguf_sha256)


def _read_tokenizer(location: dict[str, Any], header: GgufHeader, gguf: Path) -> PreTrainedTokenizerBase | None:
    if "tokenizer.ggml.model" not in header.metadata:
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**location)
    except Exception as error:  # a parser of foreign bytes raises whatever it trips over
        raise ModelFileError(f"the tokenizer in {gguf} cannot be read: {error}") from error
    if header.metadata.get("tokenizer.ggml.pre") == "smollm":
        # `transformers` leaves out what llama.cpp and SmolLM's own tokenizer do first: each digit stands alone.
        # Without it "\n\n1" is split as no text was when the model learned.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _read_module(location: dict[str, Any], gguf: Path) -> Any:
    try:
        # packed weights would be unpacked anew in every forward, a hundred times slower
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **location,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
    except AnaphoraError:
        raise
    except Exception as error:
        if "not supported" in str(error) or "Unrecognized" in str(error):
            raise UnsupportedModelError(f"`transformers` cannot read the architecture in {gguf}: {error}") from error
        raise ModelFileError(f"the weights in {gguf} cannot be read: {error}") from error
    module, report = loaded
    if report["missing_keys"]:
        raise ModelFileError(f"{gguf} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])} ...")
    return module


def _write_identity(folder: Path, gguf_sha256: str) -> None:
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        status = path.stat()
        files[path.name] = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": file_digest(path)}
    others = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.suffix in (".json", ".jinja")}
    content = {"format": FORMAT, "gguf_sha256": gguf_sha256, "files": files, "others": others}
    (folder / IDENTITY_FILE).write_text(json.dumps(content, indent=2) + "\n")
