"""Anaphora: LLM serving that never computes the same beginning twice.

    from anaphora import LLM, SamplingParams

Importing the package, or `anaphora.core`, imports no tensor library: `LLM` is fetched when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.config import EngineConfig
from anaphora.sampling_params import SamplingParams

if TYPE_CHECKING:
    from anaphora.api.llm import LLM as LLM

__all__ = ["LLM", "EngineConfig", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from anaphora.api.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
