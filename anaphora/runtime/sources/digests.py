"""Digests of what a model is made of, and a memory of them, so that large files are read once.

Knows files and tensors; knows nothing of where they come from. All digests are SHA-256, in hex.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_CHUNK_BYTES = 1 << 20
# a file changed again within the clock's grain keeps its stamp, so a young stamp proves nothing
_SETTLED_NS = 2_000_000_000
_NOT_COMPUTING = (
    "_name_or_path",
    "_model_name_or_path",
    "_commit_hash",
    "transformers_version",
    "dtype",
    "torch_dtype",
)


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def files_digest(digests: Mapping[str, str]) -> str:
    """Digest of several files: file name -> digest of its bytes. The order of the mapping does not matter."""
    return text_digest(canonical_json(dict(digests)))


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class DigestCache:
    """Digests of the files of the user's folders, remembered by path, size, times and inode, in a folder of its own.

    A memory only: where it cannot be read or written, files are read again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def digests(self, paths: Iterable[Path]) -> dict[str, str]:
        """File name -> digest of its bytes, for files of one folder."""
        return {path.name: self._digest(path) for path in paths}

    def _digest(self, path: Path) -> str:
        path = path.resolve()
        stamp = _stamp(path)
        record = self.folder / f"{text_digest(str(path))}.json"
        try:
            known = json.loads(record.read_text())
            if known["stamp"] == stamp:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no record, or not one of ours: read the file
        digest = file_digest(path)
        settled = time.time_ns() - max(stamp[1], stamp[2]) > _SETTLED_NS
        if settled and _stamp(path) == stamp:
            self._remember(record, {"path": str(path), "stamp": stamp, "sha256": digest})
        return digest

    def _remember(self, record: Path, content: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder)
            with os.fdopen(handle, "w") as file:
                json.dump(content, file)
            os.replace(temporary, record)
        except OSError:
            return  # a read-only or full cache costs a second look next time, nothing else


def module_digest(module: torch.nn.Module) -> str:
    """Digest of a module's parameters and buffers: names, dtypes, shapes and bytes. Tied weights count once."""
    return tensors_digest(itertools.chain(module.named_parameters(), module.named_buffers()))


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of named tensors: names, dtypes, shapes and bytes. Their order does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(canonical_json([name, str(tensor.dtype), list(tensor.shape)]).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Digest of how text becomes token ids; `none` without a tokenizer. Chat templates are not part of it."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return text_digest(backend.to_str())
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    return text_digest(canonical_json([type(tokenizer).__name__, tokenizer.get_vocab(), added]))


def config_digest(config: PreTrainedConfig) -> str:
    """Digest of a model's config without names, versions and dtype."""
    return text_digest(canonical_json(_computing(json.loads(config.to_json_string(use_diff=False)))))


def _computing(value: Any) -> Any:
    """The part of a config that says how the model computes; configs nest."""
    if not isinstance(value, dict):
        return value
    return {key: _computing(item) for key, item in value.items() if key not in _NOT_COMPUTING}
