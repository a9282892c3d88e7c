"""Prompts with images or with rows of embeddings, made ready for the engine. On any thread.

Knows what callers give; must not know plans. Every error begins with the field that is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from anaphora.core.feature_keys import embedding_keys, image_keys
from anaphora.core.plan import FeatureSpan
from anaphora.engine.multimodal import NamedImage, PreparedPrompt
from anaphora.engine.prompt_check import check_text, check_token_ids
from anaphora.errors import EmptyPromptError, InvalidParameterError, PromptTooLongError
from anaphora.runtime.features import GivenRows, Source, little_endian
from anaphora.runtime.forward import module_lock
from anaphora.runtime.sources.digests import tensors_digest
from anaphora.runtime.vision import VisionModel
from anaphora.runtime.vision_images import ImageLimits, open_image

_IMAGE_FIELDS = frozenset(("prompt", "images"))
_ROW_FIELDS = frozenset(("prompt_embeds", "prompt_token_ids", "embeds_mask"))
_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FeaturePrompts:
    """The `PromptReader` of an engine over torch.

    vision: None if the model reads no images. hidden_size, dtype: of the rows that the model takes; None refuses rows.
    max_tokens: of one prompt: nothing longer is looked at.
    """

    def __init__(
        self,
        vision: VisionModel | None,
        limits: ImageLimits,
        *,
        block_size: int,
        vocab_size: int,
        hidden_size: int | None,
        dtype: torch.dtype,
        max_tokens: int,
    ) -> None:
        self._vision = vision
        self._limits = limits
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._max_tokens = max_tokens
        self.max_images = limits.max_images
        self.image_token = None if vision is None else vision.image_token

    def read(self, prompt: Mapping[str, Any], *, add_special_tokens: bool) -> PreparedPrompt:
        """`{"prompt": text, "images": [...]}` or `{"prompt_embeds": rows, ...}`: docs/multimodal.md.

        Raises InvalidParameterError, InvalidTokenError, EmptyPromptError, PromptTooLongError.
        """
        fields = set(prompt)
        if "prompt_embeds" in fields and fields <= _ROW_FIELDS:
            given = prompt["prompt_embeds"]
            is_file = isinstance(given, bytes | bytearray) and len(fields) == 1
            return self._read_rows(_load(bytes(given)) if is_file else prompt)
        if "images" in fields and fields <= _IMAGE_FIELDS:
            return self._read_images(prompt.get("prompt"), prompt["images"], add_special_tokens)
        raise InvalidParameterError(
            "a prompt that is a dict must have prompt and images, or prompt_embeds (with prompt_token_ids and "
            f"embeds_mask, if some positions are tokens); got {', '.join(map(repr, sorted(map(str, fields)))) or '{}'}"
        )

    # -- images --------------------------------------------------------------------------------------------------------

    def _read_images(self, text: object, images: object, add_special_tokens: bool) -> PreparedPrompt:
        if self._vision is None:
            raise InvalidParameterError("images are not read by this model: load one that has a vision encoder")
        if not isinstance(text, str):
            raise InvalidParameterError(f"prompt must be text where there are images, got {type(text).__name__}")
        check_text("prompt", text)
        if not isinstance(images, Sequence) or isinstance(images, str | bytes | bytearray):
            raise InvalidParameterError(f"images must be a list of images, got {type(images).__name__}")
        if len(images) > self._limits.max_images:
            raise InvalidParameterError(
                f"images has {len(images)} entries, at most {self._limits.max_images} are allowed (max_images)"
            )
        named = [
            image if isinstance(image, NamedImage) else NamedImage(f"images[{index}]", image)
            for index, image in enumerate(images)
        ]
        opened = [open_image(one.image, self._limits, one.field) for one in named]
        read = self._vision.read(text, opened, add_special_tokens=add_special_tokens)
        keys = image_keys(read.spans, self._block_size)
        return PreparedPrompt(read.token_ids, read.spans, keys, read.pixels, self._block_size, text)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _read_rows(self, prompt: Mapping[str, Any]) -> PreparedPrompt:
        rows = self._check_rows(prompt["prompt_embeds"])
        mask, token_ids = self._mask(prompt, rows.shape[0])
        spans, sources, begin = [], dict[str, Source](), 0
        place = 0
        for is_row, run in groupby(mask):
            length = len(list(run))
            if is_row:
                piece = rows[begin : begin + length]
                digest = tensors_digest([("rows", piece)])
                sources[digest] = GivenRows(piece)
                spans.append(FeatureSpan(place, length, digest, has_tokens=False))
                begin += length
            place += length
        keys = embedding_keys(mask, little_endian(rows), self._block_size)
        return PreparedPrompt(token_ids, tuple(spans), keys, sources, self._block_size)

    def _check_rows(self, given: object) -> torch.Tensor:
        if self._hidden_size is None:
            raise InvalidParameterError("prompt_embeds are not taken by this model, whose input is more than one row")
        rows = given
        if not isinstance(rows, torch.Tensor) or rows.layout != torch.strided or rows.is_meta:
            raise InvalidParameterError(f"prompt_embeds must be a dense tensor, got {type(rows).__name__}")
        if rows.dim() != 2 or rows.shape[1] != self._hidden_size:
            raise InvalidParameterError(
                f"prompt_embeds must have the shape [rows, {self._hidden_size}], got {list(rows.shape)}"
            )
        if rows.dtype not in _ROW_DTYPES:
            raise InvalidParameterError(f"prompt_embeds must be float32, bfloat16 or float16, got {rows.dtype}")
        if not rows.shape[0]:
            raise EmptyPromptError("prompt_embeds has no rows; give at least one")
        self._check_length(rows.shape[0])
        rows = rows.detach().to("cpu", self._dtype, copy=True)
        if not bool(rows.isfinite().all()):
            row = int(rows.isfinite().all(dim=1).logical_not().nonzero()[0])
            raise InvalidParameterError(f"prompt_embeds has a number in row {row} that is not finite in {self._dtype}")
        return rows.contiguous()

    def _mask(self, prompt: Mapping[str, Any], num_rows: int) -> tuple[list[bool], list[int]]:
        """Of each position, whether it is a row, and its token: 0 at every row, so that one prompt has one form."""
        token_ids, mask = prompt.get("prompt_token_ids"), prompt.get("embeds_mask")
        if token_ids is None and mask is None:
            return [True] * num_rows, [0] * num_rows
        if token_ids is None or mask is None:
            raise InvalidParameterError("embeds_mask and prompt_token_ids belong together: give both")
        mask = mask.tolist() if hasattr(mask, "tolist") else mask
        if not isinstance(mask, Sequence) or set(map(type, mask)) - {bool}:
            raise InvalidParameterError("embeds_mask must be a list of True (a row) and False (a token)")
        self._check_length(len(mask))
        checked = check_token_ids(token_ids, self._vocab_size)
        if len(checked) != len(mask):
            raise InvalidParameterError(f"embeds_mask has {len(mask)} entries, prompt_token_ids {len(checked)}")
        if sum(mask) != num_rows:
            raise InvalidParameterError(f"embeds_mask has {sum(mask)} rows, prompt_embeds {num_rows}")
        return list(mask), [0 if is_row else token for is_row, token in zip(mask, checked, strict=True)]

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._max_tokens:
            raise PromptTooLongError(
                f"prompt_embeds give {num_tokens} positions, and {self._max_tokens} are possible here: shorten them"
            )


@torch.inference_mode()
def rows_size(module: PreTrainedModel) -> int | None:
    """Numbers in a row that stands for a token; None if a few tokens given as rows are not the same to this model."""
    model: Any = module
    ids = torch.tensor([[0, 1]], device=module.device)
    try:
        with module_lock(module):
            rows = model.get_input_embeddings()(ids)
            by_row, by_id = model(inputs_embeds=rows, use_cache=False), model(input_ids=ids, use_cache=False)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    same = torch.allclose(by_row.logits.float(), by_id.logits.float(), rtol=1e-2, atol=1e-2, equal_nan=True)
    return int(rows.shape[-1]) if same else None


def _load(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, named as the fields. Never a pickle: those run code."""
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise InvalidParameterError(f"prompt_embeds is no safetensors file ({error}): a pickle is not taken") from None
    if "prompt_embeds" not in tensors or not _ROW_FIELDS.issuperset(tensors):
        raise InvalidParameterError(
            f"prompt_embeds must hold a tensor of that name, and at most {' and '.join(sorted(_ROW_FIELDS))}, "
            f"got {sorted(tensors)}"
        )
    return tensors
