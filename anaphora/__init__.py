"""Anaphora: LLM serving that never computes the same beginning twice.

    from anaphora import LLM, SamplingParams

Importing the package, or `anaphora.core`, imports no tensor library: `LLM` is fetched when it is first asked for, and
lets idle OpenMP threads sleep unless OMP_WAIT_POLICY is set (anaphora.api.openmp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.config import EngineConfig
from anaphora.salt_regions import SaltRegions
from anaphora.sampling_params import SamplingParams

if TYPE_CHECKING:
    from anaphora.api.llm import LLM as LLM

__all__ = ["LLM", "EngineConfig", "SaltRegions", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from anaphora.api.llm import LLM
        from anaphora.api.openmp import let_idle_threads_sleep

        let_idle_threads_sleep()
        return LLM
    if name == "__version__":
        from importlib.metadata import version

        return version("anaphora")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
