"""Where models come from: names, downloads, conversion and digests. `anaphora.runtime.model` loads what they give.

Light on purpose: listing models loads no tensor library; `resolve` does.
"""

from anaphora.runtime.sources.builtin import BUILTIN_MODELS, BuiltinModel
from anaphora.runtime.sources.catalog import ModelInfo, list_models
from anaphora.runtime.sources.disk import default_cache_dir

__all__ = ["BUILTIN_MODELS", "BuiltinModel", "ModelInfo", "default_cache_dir", "list_models"]
