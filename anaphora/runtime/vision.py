"""Images of a vision-language model: by its own processor to tokens and pixels, by its own encoder to rows.

Knows `transformers` processors and classes; must not know plans or requests. Whether what is read off a class here is
right is measured before it is used: see vision_agreement.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from anaphora.core.plan import FeatureSpan
from anaphora.errors import InvalidParameterError, UnsupportedModelError
from anaphora.runtime.features import Pixels, little_endian
from anaphora.runtime.forward import module_lock
from anaphora.runtime.sources.digests import canonical_json

_IMAGE_TAG = b"anaphora/image"
_FORMAT_VERSION = 1
_TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def image_digest(pixels: torch.Tensor, processing: str) -> str:
    """SHA-256, in hex, of what an encoder is given: see docs/hash-format.md.

    pixels: after all processing. processing: what was done, in plain text.
    """
    head = _IMAGE_TAG + bytes([_FORMAT_VERSION])
    for text in (processing, str(pixels.dtype).removeprefix("torch.")):
        head += struct.pack("<I", len(text.encode())) + text.encode()
    head += struct.pack(f"<I{pixels.dim()}I", pixels.dim(), *pixels.shape)
    return hashlib.sha256(head + little_endian(pixels)).hexdigest()


@dataclass(frozen=True, slots=True)
class ReadImages:
    """token_ids: with every placeholder expanded. spans: of each image, in order. pixels: by digest."""

    token_ids: list[int]
    spans: tuple[FeatureSpan, ...]
    pixels: dict[str, Pixels]


class VisionModel:
    """A model's own way with images.

    processor: made for this module; one that turns each image into one entry of `pixel_values`, and its placeholder
    into one run of image tokens. Raises UnsupportedModelError.
    """

    def __init__(self, module: PreTrainedModel, processor: Any) -> None:
        self._module: Any = module
        self._processor = processor
        name = type(module).__name__
        token, token_id = getattr(processor, "image_token", None), getattr(module.config, "image_token_id", None)
        if not isinstance(token, str) or not isinstance(token_id, int) or not hasattr(module, "get_image_features"):
            raise UnsupportedModelError(f"{name} does not say how it reads images: use a model of the LLaVA type")
        if processor.tokenizer.convert_tokens_to_ids(token) != token_id:
            raise UnsupportedModelError(f"the processor's {token!r} is not the image token of {name}: use its own one")
        self.image_token: str = token
        self._token_id = token_id
        image_processor = processor.image_processor
        self._processing = canonical_json([type(image_processor).__name__, image_processor.to_dict()])

    def read(self, text: str, images: Sequence[Any], *, add_special_tokens: bool) -> ReadImages:
        """Text with a placeholder for each image. images: PIL, RGB. On any thread. Raises InvalidParameterError."""
        if text.count(self.image_token) != len(images):
            raise InvalidParameterError(
                f"images must be as many as the prompt has {self.image_token} placeholders: "
                f"{len(images)} images, {text.count(self.image_token)} placeholders"
            )
        try:
            given: Any = self._processor(
                text=[text],
                images=list(images) or None,
                add_special_tokens=add_special_tokens,
                return_tensors="pt",
            )
        except ValueError as error:  # an image that its processor cannot take, such as one far too narrow
            raise InvalidParameterError(f"images cannot be processed for this model: {error}") from error
        token_ids: list[int] = given["input_ids"][0].tolist()
        if not images:
            return ReadImages(token_ids, (), {})
        others = sorted(set(given) - _TEXT_INPUTS - {"pixel_values"})
        values = given.get("pixel_values")
        if others or not isinstance(values, torch.Tensor) or values.shape[0] != len(images):
            raise UnsupportedModelError(
                f"{type(self._processor).__name__} gives {', '.join(others) or 'other than one entry an image'} "
                "besides pixel values: use a model of the LLaVA type"
            )
        digests = [image_digest(one, self._processing) for one in values]
        pixels = {digest: Pixels(one.clone()) for digest, one in zip(digests, values, strict=True)}
        return ReadImages(token_ids, self._spans(token_ids, digests), pixels)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Rows [n, hidden] of one image. Not while a step of any engine over this module runs: waits for it."""
        values = pixels.unsqueeze(0).to(self._module.device, self._module.dtype)
        with module_lock(self._module), torch.inference_mode():
            # Of the batch of one; a list or a tensor. A clone: the rest of the encoder's output goes.
            rows: torch.Tensor = self._module.get_image_features(pixel_values=values, return_dict=True).pooler_output[0]
            return rows.clone().reshape(-1, rows.shape[-1])

    def _spans(self, token_ids: Sequence[int], digests: Sequence[str]) -> tuple[FeatureSpan, ...]:
        places = [place for place, token_id in enumerate(token_ids) if token_id == self._token_id]
        length, rest = divmod(len(places), len(digests))
        starts = places[:: max(1, length)]
        if rest or not length or any(places[i * length + length - 1] != s + length - 1 for i, s in enumerate(starts)):
            raise UnsupportedModelError(
                f"{type(self._processor).__name__} does not give each image one run of {self.image_token}: "
                "use a model of the LLaVA type"
            )
        return tuple(FeatureSpan(start, length, digest) for start, digest in zip(starts, digests, strict=True))
