"""What a loaded model's attention layers are, and what limits its context.

Knows `transformers` classes; knows nothing of plans. Nothing is guessed from config names where it can be seen:
a dry forward of two tokens shows each layer's heads, sizes and mask. What would be wrong is refused with
UnsupportedModelError.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from anaphora.core.groups import CacheLayout
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.attention import dispatch
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.kv_cache import KVShape, LayerPlace
from anaphora.runtime.layer_kinds import ATTENTION_TYPES, MaskFunction, SeenLayer, kind_of, lay_out
from anaphora.runtime.recurrent import RecurrentLayers

_INSPECT_NAME = "anaphora_inspect"


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The attention layers of a model, in the order in which it calls them, and the groups of its cache.

    layers: a module's `layer_idx` -> its number in `places`.
    places: of each layer, its group, its place in a block, and what it stores per token.
    cache: the groups.
    max_model_len: tokens of a request up to which this holds.
    dtype: what attention computes in.
    vocab_size: token ids that can be both read and chosen.
    recurrent: the recurrent layers; None if there are none.
    """

    layers: dict[int, int]
    places: tuple[LayerPlace, ...]
    cache: CacheLayout
    max_model_len: int
    dtype: torch.dtype
    vocab_size: int
    recurrent: RecurrentLayers | None = None


class _Recorder:
    """An attention context that computes nothing and notes what it is called with."""

    states = None  # recurrent layers run from the zero state

    def __init__(self, layer_types: tuple[str, ...]) -> None:
        self.layers: dict[int, int] = {}
        self.seen: list[SeenLayer] = []
        self.dtypes: set[torch.dtype] = set()
        self._layer_types = layer_types

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        name = type(module).__name__
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int) or layer_idx in self.layers:
            raise UnsupportedModelError(f"{name} has no layer_idx of its own (got {layer_idx!r}); use another model")
        mask = kwargs.get("attention_mask")
        mask_function: MaskFunction | None = getattr(mask, "mask_function", None)
        if kwargs.get("position_bias") is not None or (mask is not None and mask_function is None):
            raise UnsupportedModelError(f"{name} adds a bias or mask of its own to the scores; use another model")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModelError(f"{name} attends to more than its own tokens; use another model")
        self.layers[layer_idx] = len(self.seen)
        layer_type = self._layer_types[layer_idx] if layer_idx < len(self._layer_types) else None
        shape = KVShape(key.shape[1], key.shape[3], value.shape[3])
        self.seen.append(SeenLayer(name, shape, kwargs.get("sliding_window"), layer_type, mask_function))
        self.dtypes.add(query.dtype)
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


def _show_mask(
    *, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device | str = "cpu", **_: Any
) -> torch.Tensor:
    """What `transformers` calls to make a mask: a stand-in that carries the function itself to the recorder."""
    mask: Any = torch.ones((1, 1, q_length, kv_length), dtype=torch.bool, device=device)
    mask.mask_function = mask_function
    return mask  # type: ignore[no-any-return]


AttentionInterface.register(_INSPECT_NAME, dispatch)
AttentionMaskInterface.register(_INSPECT_NAME, _show_mask)


@torch.inference_mode()
def inspect_model(module: PreTrainedModel, max_model_len: int) -> ModelLayout:
    """The attention layers of a causal LM, seen in a dry forward of two tokens. Raises UnsupportedModelError.

    max_model_len: most tokens of one request. What a window cuts off beyond it does not count.
    """
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
    layer_types = tuple(getattr(config, "layer_types", None) or ())
    recurrent = RecurrentLayers(module)
    other = set(layer_types) - set(ATTENTION_TYPES)
    if other and not recurrent:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(other))}; supported are {', '.join(ATTENTION_TYPES)}, and "
            "recurrent ones that keep their state in the library's cache: use another model"
        )
    recorder = _Recorder(layer_types)
    ids = torch.zeros((1, 2), dtype=torch.int64, device=module.device)
    positions = torch.arange(2, device=module.device).unsqueeze(0)
    try:
        logits, hidden = PagedForward(module, attention=_INSPECT_NAME)(ids, positions, positions[0], recorder)
    except (TypeError, AttributeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} cannot be called with packed tokens and without an attention mask ({error}); use another model"
        ) from error
    if not (recorder.layers or recurrent) or hidden is None:
        raise UnsupportedModelError(
            f"{name} does not use the attention interface of `transformers` or hides its decoder, "
            "so its keys and values cannot be paged; use another model"
        )
    if len(recorder.layers) != config.num_hidden_layers and not recurrent:
        raise UnsupportedModelError(
            f"{name} has {config.num_hidden_layers} layers, of which {len(recorder.layers)} are attention layers; "
            "only models whose every layer is an attention or a recurrent layer are served"
        )
    kinds = [kind_of(layer, config, max_model_len) for layer in recorder.seen]
    places, cache = lay_out(kinds, [layer.shape for layer in recorder.seen], has_state=bool(recurrent))
    return ModelLayout(
        layers=recorder.layers,
        places=places,
        cache=cache,
        max_model_len=max_model_len,
        dtype=recorder.dtypes.pop() if len(recorder.dtypes) == 1 else module.dtype,
        vocab_size=min(model.get_input_embeddings().num_embeddings, logits.shape[-1]),
        recurrent=recurrent if recurrent else None,
    )


def check_context(module: PreTrainedModel, max_model_len: int) -> None:
    """Refuse what depends on more than a token's position and the tokens before it, within max_model_len tokens."""
    name = type(module).__name__
    config = module.config.get_text_config()
    for rope in _rope_settings(config):
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope.get("rope_type") in ("dynamic", "longrope") and max_model_len > limit:
            raise UnsupportedModelError(
                f"{name} scales its rotary embedding ({rope['rope_type']}) by the longest sequence of the batch "
                f"beyond {limit} tokens, so its keys cannot be reused: set max_model_len to {limit} or less "
                f"(it is {max_model_len})"
            )
    limit = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and limit is not None and max_model_len >= limit:
        raise UnsupportedModelError(
            f"{name} scales its queries by their place in the batch, from {limit} tokens on, which is not their "
            f"position in a packed batch: set max_model_len to {int(limit) - 1} or less (it is {max_model_len})"
        )


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [part for part in parameters.values() if isinstance(part, dict)]  # one set for each layer type
