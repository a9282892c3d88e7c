"""Lists the built-in models for people. Fetches nothing and imports no tensor library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anaphora.runtime.sources.builtin import BUILTIN_MODELS
from anaphora.runtime.sources.converted import converted_folder, is_converted
from anaphora.runtime.sources.disk import default_cache_dir


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A built-in model, for people. path: its folder if it is here already; sizes in bytes."""

    name: str
    description: str
    licence: str
    num_parameters: int
    download_bytes: int
    converted_bytes: int
    path: Path | None

    @property
    def cached(self) -> bool:
        return self.path is not None


def list_models(cache_dir: Path | None = None) -> list[ModelInfo]:
    """The built-in models, and which of them are converted in this cache folder. Fetches nothing."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    return [
        ModelInfo(
            name=model.name,
            description=model.description,
            licence=model.licence,
            num_parameters=model.num_parameters,
            download_bytes=model.download_bytes,
            converted_bytes=model.converted_bytes,
            path=folder if is_converted(folder := converted_folder(cache_dir, model.name, model.sha256)) else None,
        )
        for model in BUILTIN_MODELS
    ]
