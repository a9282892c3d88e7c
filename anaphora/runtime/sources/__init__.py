"""Where models come from: names, downloads, conversion and digests. `anaphora.runtime.model` loads what they give."""

from anaphora.runtime.sources.builtin import BUILTIN_MODELS, BuiltinModel
from anaphora.runtime.sources.disk import default_cache_dir
from anaphora.runtime.sources.resolve import ModelInfo, ModelSource, list_models, resolve_model

__all__ = [
    "BUILTIN_MODELS",
    "BuiltinModel",
    "ModelInfo",
    "ModelSource",
    "default_cache_dir",
    "list_models",
    "resolve_model",
]
