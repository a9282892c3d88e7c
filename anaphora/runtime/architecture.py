"""What a loaded model's attention layers are, and whether the engine computes them rightly.

Knows `transformers` classes; knows nothing of plans. Nothing is guessed from config names where it can be seen:
a dry forward of two tokens shows each layer's heads and sizes, and a few tokens computed by both the model itself
and the paged path show that the two agree. What would be wrong is refused with UnsupportedModelError.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from anaphora.core.ids import BlockId, RequestId, TokenId
from anaphora.core.plan import ScheduledRequest
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.inputs import BlockTables, build_inputs
from anaphora.runtime.kv_cache import KVCache, KVShape

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The attention layers of a model, in the order in which it calls them.

    layers: a module's `layer_idx` -> its place in `shapes`.
    shapes: what each layer stores per token.
    windows: sliding window of each layer in tokens, None where attention is full.
    dtype: what attention computes in.
    vocab_size: token ids that can be both read and chosen.
    """

    layers: dict[int, int]
    shapes: tuple[KVShape, ...]
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    vocab_size: int


class _Recorder:
    """An attention context that computes nothing and notes what it is called with."""

    def __init__(self) -> None:
        self.layers: dict[int, int] = {}
        self.shapes: list[KVShape] = []
        self.windows: list[int | None] = []
        self.dtypes: set[torch.dtype] = set()

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        name = type(module).__name__
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int) or layer_idx in self.layers:
            raise UnsupportedModelError(f"{name} has no layer_idx of its own (got {layer_idx!r}); use another model")
        if kwargs.get("position_bias") is not None or kwargs.get("attention_mask") is not None:
            raise UnsupportedModelError(f"{name} adds a bias or mask of its own to the scores; use another model")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModelError(f"{name} attends to more than its own tokens; use another model")
        self.layers[layer_idx] = len(self.shapes)
        self.shapes.append(KVShape(key.shape[1], key.shape[3], value.shape[3]))
        self.windows.append(kwargs.get("sliding_window"))
        self.dtypes.add(query.dtype)
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


@torch.inference_mode()
def inspect_model(module: PreTrainedModel) -> ModelLayout:
    """The attention layers of a causal LM, seen in a dry forward of two tokens. Raises UnsupportedModelError."""
    name = type(module).__name__
    model: Any = module  # the library's own annotations are partial
    if getattr(module.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only causal LMs are served")
    if (
        not module.can_generate()
        or model.get_output_embeddings() is None
        or "logits_to_keep" not in inspect.signature(module.forward).parameters
    ):
        raise UnsupportedModelError(f"{name} is not a causal LM of `transformers`; load its ...ForCausalLM class")
    config = module.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if other:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(other))}; only {FULL_ATTENTION} is supported: "
            "use another model"
        )
    recorder = _Recorder()
    ids = torch.zeros((1, 2), dtype=torch.int64, device=module.device)
    positions = torch.arange(2, device=module.device).unsqueeze(0)
    try:
        logits, hidden = PagedForward(module)(ids, positions, positions[0], recorder)
    except (TypeError, AttributeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} cannot be called with packed tokens and without an attention mask ({error}); use another model"
        ) from error
    if not recorder.layers or hidden is None:
        raise UnsupportedModelError(
            f"{name} does not use the attention interface of `transformers` or hides its decoder, "
            "so its keys and values cannot be paged; use another model"
        )
    if len(recorder.layers) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{name} has {config.num_hidden_layers} layers, of which {len(recorder.layers)} are attention layers; "
            "only models whose every layer is full attention are served"
        )
    return ModelLayout(
        layers=recorder.layers,
        shapes=tuple(recorder.shapes),
        windows=tuple(recorder.windows),
        dtype=recorder.dtypes.pop() if len(recorder.dtypes) == 1 else module.dtype,
        vocab_size=min(model.get_input_embeddings().num_embeddings, logits.shape[-1]),
    )


def smallest_window(module: PreTrainedModel, layout: ModelLayout) -> int | None:
    """The smallest sliding window of the layers in tokens, seen or configured; None if all attention is full."""
    config = module.config.get_text_config()
    windows = {window for window in layout.windows if window is not None}
    kinds = set(getattr(config, "layer_types", None) or ())
    if SLIDING_ATTENTION in kinds and getattr(config, "sliding_window", None) is not None:
        windows.add(config.sliding_window)
    return min(windows, default=None)


def check_context(module: PreTrainedModel, layout: ModelLayout, max_model_len: int) -> None:
    """Refuse what is not full attention, or depends on the longest sequence of a batch, within max_model_len tokens.

    A sliding window of at least max_model_len tokens never cuts anything off: it is full attention.
    """
    name = type(module).__name__
    config = module.config.get_text_config()
    window = smallest_window(module, layout)
    if window is not None and window < max_model_len:
        raise UnsupportedModelError(
            f"{name} has layers of type {SLIDING_ATTENTION} with a window of {window} tokens; only "
            f"{FULL_ATTENTION} is supported: set max_model_len to {window} or less (it is {max_model_len}), "
            "or leave it out"
        )
    for rope in _rope_settings(config):
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope.get("rope_type") in ("dynamic", "longrope") and max_model_len > limit:
            raise UnsupportedModelError(
                f"{name} scales its rotary embedding ({rope['rope_type']}) by the longest sequence of the batch "
                f"beyond {limit} tokens, so its keys cannot be reused: set max_model_len to {limit} or less "
                f"(it is {max_model_len})"
            )


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [part for part in parameters.values() if isinstance(part, dict)]  # one set for each layer type


@torch.inference_mode()
def check_agreement(module: PreTrainedModel, layout: ModelLayout) -> None:
    """Compare the paged path with the model's own forward on two short sequences. Raises UnsupportedModelError.

    One sequence is cut in two steps, packed with the other, and in shuffled blocks: positions, masks and reads from
    the pool all take part. Catches classes that ignore explicit positions or hide a bias from the interface.
    """
    length, block_size = 6, 4
    stride = max(1, layout.vocab_size // (2 * length + 1))
    ids = torch.arange(1, 2 * length + 1).mul_(stride).remainder_(layout.vocab_size).view(2, length)
    expected = module(input_ids=ids.to(module.device), use_cache=False).logits
    first, second = [[TokenId(token) for token in row] for row in ids.tolist()]

    cache = KVCache(layout.shapes, num_blocks=5, block_size=block_size, dtype=layout.dtype, device=module.device)
    tables = BlockTables(2, 2 * block_size, block_size, module.device)
    tables.append([(0, (BlockId(3), BlockId(1))), (1, (BlockId(4), BlockId(2)))])
    forward = PagedForward(module)
    got = torch.empty_like(expected)
    for scheduled, rows in (
        ([_request(0, first[:4])], [0]),
        ([_request(0, second[:5]), _request(4, first[4:])], [1, 0]),
        ([_request(5, second[5:])], [1]),
    ):
        inputs = build_inputs(scheduled, rows, tables, layout.dtype)
        context = PagedContext(cache, layout.layers, inputs.slot_mapping, inputs.calls)
        keep = torch.arange(inputs.input_ids.shape[1], device=module.device)
        logits, _ = forward(inputs.input_ids, inputs.position_ids, keep, context)
        for request, row, (begin, end) in zip(scheduled, rows, inputs.spans, strict=True):
            got[row, request.start : request.start + end - begin] = logits[begin:end]
    error = (got.double() - expected.double()).norm() / expected.double().norm()  # logits may be masked with huge ones
    tolerance = 1e-3 if layout.dtype in (torch.float32, torch.float64) else 0.2
    # A model that is broken by itself (non-finite) is not for us to judge: its requests fail one by one.
    if bool(expected.isfinite().all()) and not error <= tolerance:
        raise UnsupportedModelError(
            f"{type(module).__name__} gives other results through the paged attention than by itself (relative error "
            f"{error:.2g}), so it needs something that the attention interface does not show; use another model"
        )


def _request(start: int, token_ids: list[TokenId]) -> ScheduledRequest:
    return ScheduledRequest(RequestId("probe"), start, tuple(token_ids), (), sample=False)
