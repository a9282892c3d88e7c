"""Prompts that hold more than tokens: what the engine is told of them, and who makes them ready.

Knows positions, keys and digests; must not know pixels or tensors, which pass through to the executor unseen.

    {"prompt": "<image> What is it?", "images": [...]}   --PromptReader-->   PreparedPrompt: token ids, spans, keys
    {"prompt_embeds": rows, ...}                                             and, by digest, what the executor takes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from anaphora.core.hashing import ExtraKey
from anaphora.core.plan import FeatureSpan
from anaphora.errors import InvalidParameterError
from anaphora.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt, ready for `Engine.add_request`. Its length is that of its tokens.

    token_ids: with placeholders where features stand: an image's own, and 0 where the caller gave a row.
    spans, extra_keys: where features stand, and what they are. sources: what the executor makes rows of, by digest.
    block_size: of the blocks that the keys enter. text: what it was made of, if it was text.
    """

    token_ids: Sequence[int]
    spans: tuple[FeatureSpan, ...]
    extra_keys: tuple[ExtraKey, ...]
    sources: Mapping[str, Any]
    block_size: int
    text: str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image and what errors call it. image: a file's bytes, a PIL.Image, or a URL that was not followed yet."""

    field: str
    image: Any


NO_FEATURES = PreparedPrompt((), (), (), {}, 0)

Prompt = str | Sequence[int] | Mapping[str, Any] | PreparedPrompt
"""What an engine takes: text, token ids, a dict with images or rows, or one that was read already."""


TokenPrompt = Sequence[int] | PreparedPrompt
"""A prompt that was tokenised."""


class PromptReader(Protocol):
    """Makes prompts ready; slow, on any thread.

    image_token: what stands in a text for each image; None if the model reads no images. max_images: in one prompt.
    """

    image_token: str | None
    max_images: int

    def read(self, prompt: Mapping[str, Any], *, add_special_tokens: bool) -> PreparedPrompt:
        """Raises InvalidParameterError, EmptyPromptError, InvalidTokenError that begin with the field to blame."""
        ...


@runtime_checkable
class FeatureHolder(Protocol):
    """The part of an executor that turns sources into rows. What is held can be asked for by any plan."""

    def add_features(self, sources: Mapping[str, Any]) -> None: ...

    def release_features(self, digests: Iterable[str]) -> None: ...


def text_of(prompt: Prompt) -> str | None:
    """What a prompt was made of, if it was text."""
    if isinstance(prompt, PreparedPrompt):
        return prompt.text
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def check_features(prompt: PreparedPrompt, sampling: SamplingParams) -> None:
    """Raises InvalidParameterError for what needs tokens where there are only rows."""
    if sampling.repetition_penalty != 1.0 and any(not span.has_tokens for span in prompt.spans):
        raise InvalidParameterError(
            "repetition_penalty counts the tokens of the prompt, and prompt_embeds are none: leave it at 1"
        )
