"""Whether images through the paged path give what the model gives by itself: one image computed by both.

Knows how a step is made without a plan. Catches classes whose image tokens see each other, have positions in more
than one dimension, or enter the model by other ways than as rows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from anaphora.core.ids import TokenId
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.agreement import BLOCK_SIZE, probe_request, probe_tables
from anaphora.runtime.architecture import ModelLayout
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.features import FeatureStore, input_rows
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.inputs import build_inputs
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.vision import VisionModel

TOLERANCE = 1e-3
TOLERANCE_HALF = 0.2  # of numbers of 16 bits


@torch.inference_mode()
def check_vision(module: PreTrainedModel, layout: ModelLayout, vision: VisionModel) -> None:
    """Compare the two on an image of stripes, cut in two steps. Raises UnsupportedModelError."""
    from PIL import Image

    image = Image.linear_gradient("L").resize((61, 37)).convert("RGB")
    read = vision.read(vision.image_token, [image], add_special_tokens=True)
    token_ids, (span,) = [TokenId(token_id) for token_id in [*read.token_ids, 1]], read.spans
    if len(token_ids) > layout.max_model_len:
        raise UnsupportedModelError(
            f"one image takes {span.length} tokens, and max_model_len is {layout.max_model_len}: set a larger one"
        )
    name = type(module).__name__
    ids, pixels = torch.tensor([token_ids], device=module.device), read.pixels[span.digest].values
    expected = _own_logits(module, ids, pixels)
    store = FeatureStore(vision.encode, 1 << 40)
    store.hold(read.pixels)
    tables, num_blocks = probe_tables(layout, len(token_ids), module.device)
    cache = KVCache(
        layout.places, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=layout.dtype, device=module.device
    )
    parts, middle = [], span.start + max(1, span.length // 2)
    for request in (probe_request(0, token_ids[:middle]), probe_request(middle, token_ids[middle:])):
        inputs = build_inputs([request], [0], tables, layout.cache.groups, layout.dtype)
        keep = torch.arange(len(request.token_ids), device=module.device)
        try:
            rows = input_rows([request], [read.spans], inputs, store)
            context = PagedContext(cache, layout.layers, inputs.groups)
            logits, _ = PagedForward(module)(inputs.input_ids, inputs.position_ids, keep, context, rows=rows)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise UnsupportedModelError(f"{name} cannot be given images as rows ({error})") from error
        parts.append(logits)
    difference = float((torch.cat(parts).double() - expected.double()).norm() / expected.double().norm())
    tolerance = TOLERANCE if layout.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    if bool(expected.isfinite().all()) and not difference <= tolerance:
        raise UnsupportedModelError(
            f"{name} gives other results for an image through the paged attention than by itself (relative error "
            f"{difference:.2g}): its image tokens are not read like text; use a model of the LLaVA type"
        )


def _own_logits(module: Any, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    values = pixels.unsqueeze(0).to(module.device, module.dtype)
    logits: torch.Tensor = module(input_ids=ids, pixel_values=values, use_cache=False).logits[0]
    return logits
