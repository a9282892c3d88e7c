"""Decides what a name is, and makes a folder of it: built-in, folder, GGUF file or hub id.

Nothing here loads weights into memory for use; `anaphora.runtime.model` does.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from anaphora.errors import ModelFileError, UnknownModelError
from anaphora.runtime.sources.builtin import BUILTIN_MODELS, BuiltinModel, close_matches, find_builtin
from anaphora.runtime.sources.convert import convert_gguf
from anaphora.runtime.sources.converted import converted_folder, is_converted
from anaphora.runtime.sources.digests import DigestCache
from anaphora.runtime.sources.disk import build_once, check_space
from anaphora.runtime.sources.fetch import Download, fetch_gguf, pip_download
from anaphora.runtime.sources.gguf_header import read_gguf_header
from anaphora.runtime.sources.hub import fetch_snapshot
from anaphora.runtime.sources.progress import Progress

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as a folder on this machine. name: what to call it."""

    name: str
    folder: Path


def resolve_model(
    model: str | os.PathLike[str],
    cache_dir: Path,
    progress: Progress,
    *,
    builtin_models: tuple[BuiltinModel, ...] = BUILTIN_MODELS,
    download: Download = pip_download,
) -> ModelSource:
    """A folder with this model's files; fetched or converted if it has to be.

    A built-in name wins over a folder of that name (`./name` is the folder); a folder or file wins over a hub id.
    Raises UnknownModelError, ModelFileError, FetchError, ChecksumError, DiskSpaceError, UnsupportedModelError.
    """
    name = os.fspath(model)
    if isinstance(model, str) and (builtin := find_builtin(name, builtin_models)) is not None:
        return ModelSource(builtin.name, _builtin_folder(builtin, cache_dir, progress, download))
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        return _from_folder(path, cache_dir, progress)
    if name and os.path.exists(path):
        return _from_gguf(path, cache_dir, progress)
    if isinstance(model, str) and _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return ModelSource(name, fetch_snapshot(name, progress))
    raise UnknownModelError(_unknown(model, name, builtin_models))


def _unknown(model: object, name: str, builtin_models: tuple[BuiltinModel, ...]) -> str:
    if not isinstance(model, str) or os.sep in name or name.startswith((".", "~")) or name.endswith(".gguf"):
        return f"there is no file or folder {name}: check the path"
    similar = close_matches(name, builtin_models)
    hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
    names = ", ".join(model.name for model in builtin_models)
    return (
        f"unknown model {name!r}.{hint} Built-in models: {names}. Or give a folder, a GGUF file, or a hub id, "
        "which looks like organisation/name"
    )


def _builtin_folder(model: BuiltinModel, cache_dir: Path, progress: Progress, download: Download) -> Path:
    def build(folder: Path) -> None:
        check_space(folder.parent, model.download_bytes + model.gguf_bytes + model.converted_bytes)
        scratch = folder / "fetched"
        scratch.mkdir()
        gguf = fetch_gguf(model, scratch, progress, download)
        convert_gguf(gguf, folder, model.sha256, progress)
        shutil.rmtree(scratch)

    return build_once(converted_folder(cache_dir, model.name, model.sha256), is_converted, build)


def _from_folder(folder: Path, cache_dir: Path, progress: Progress) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(folder.resolve().name, folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], cache_dir, progress)
    if ggufs:
        raise ModelFileError(f"{folder} holds {len(ggufs)} GGUF files: give the path of one, such as {ggufs[0]}")
    if (folder / "adapter_config.json").is_file():
        raise ModelFileError(f"{folder} holds an adapter, not a model: merge it into its base model first")
    raise ModelFileError(f"{folder} has no config.json: give the folder of a model saved by `save_pretrained`")


def _from_gguf(path: Path, cache_dir: Path, progress: Progress) -> ModelSource:
    try:
        read_gguf_header(path)
        digest = DigestCache(cache_dir / "digests").digests([path])[path.name]
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    target = converted_folder(cache_dir, path.stem, digest)
    return ModelSource(path.stem, build_once(target, is_converted, lambda to: convert_gguf(path, to, digest, progress)))
