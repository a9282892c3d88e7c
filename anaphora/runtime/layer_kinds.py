"""From what is seen of a model's attention layers to the groups of its cache.

Knows attention kinds, the words of a config, and masks of `transformers` as functions; knows nothing of modules.
A config and a layer's `sliding_window` argument say what a layer may be; where the class makes its mask with the
library, the mask function itself decides: it is asked at the borders of each kind, at any position, without a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anaphora.core.groups import AttentionKind, CacheLayout, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.kv_cache import KVShape, LayerPlace

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
CHUNKED_ATTENTION = "chunked_attention"
ATTENTION_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION)

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query position, key position), int64 [n] each -> bool [n]: whether the query sees the key."""


@dataclass(frozen=True, slots=True)
class SeenLayer:
    """One attention layer as it called the attention interface.

    window: its `sliding_window` argument. layer_type: by the config, None if that has no types.
    mask: None where the class leaves masks to the interface, or makes them without the library.
    """

    name: str
    shape: KVShape
    window: int | None
    layer_type: str | None
    mask: MaskFunction | None


def kind_of(layer: SeenLayer, config: Any, max_model_len: int) -> AttentionKind:
    """What a layer sees within max_model_len tokens. Raises UnsupportedModelError.

    A window or chunk of at least max_model_len tokens cuts nothing off: it is full attention.
    """
    by_type: dict[str | None, AttentionKind] = {FULL_ATTENTION: FullAttention()}
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if isinstance(window, int) and window > 0:
        by_type[SLIDING_ATTENTION] = SlidingWindow(window)
    if isinstance(chunk, int) and chunk > 0:
        by_type[CHUNKED_ATTENTION] = ChunkedAttention(chunk)
    if layer.layer_type in ATTENTION_TYPES and layer.layer_type not in by_type:
        raise UnsupportedModelError(
            f"{layer.name} is of type {layer.layer_type}, and its config does not say how far that sees: "
            "use another model"
        )
    likely: list[AttentionKind] = [SlidingWindow(layer.window)] if layer.window and layer.window > 0 else []
    likely += [by_type[layer.layer_type]] if layer.layer_type in by_type else []  # else it names more than attention
    likely += by_type.values()
    if layer.mask is None:
        return _within(likely[0], max_model_len)
    if _shows(layer.mask, [(0, 1, True)]):
        raise UnsupportedModelError(
            f"{layer.name} sees later tokens, as an encoder does: what it computed for a beginning is of no use for a "
            "longer text; use a causal LM"
        )
    for kind in dict.fromkeys(_within(kind, max_model_len) for kind in likely):
        if _is_mask_of(layer.mask, kind, max_model_len):
            return kind
    raise UnsupportedModelError(
        f"{layer.name} has a mask that is neither causal, nor a sliding window or chunk that its config names "
        f"({', '.join(map(str, dict.fromkeys(likely)))}); use another model"
    )


def _within(kind: AttentionKind, max_model_len: int) -> AttentionKind:
    return FullAttention() if kind.span is None or kind.span >= max_model_len else kind


def _is_mask_of(mask: MaskFunction, kind: AttentionKind, max_model_len: int) -> bool:
    """Whether a mask function shows what the kind says, at its borders and at powers of two."""
    span = kind.span or 1
    near = [centre + offset for centre in (span, 2 * span, 3 * span) for offset in range(-2, 3)]
    far = [2**power + offset for power in range(max_model_len.bit_length()) for offset in (-1, 0)]
    queries = {position for position in (*near, *far, max_model_len - 1) if 0 <= position < max_model_len}
    pairs: list[tuple[int, int, bool]] = []
    for query in sorted(queries):
        first = kind.first_visible(query)
        keys = {0, first - 1, first, (first + query) // 2, query - 1, query, query + 1}
        pairs += [(query, key, first <= key <= query) for key in keys if key >= 0]
    return _shows(mask, pairs)


def _shows(mask: MaskFunction, pairs: Sequence[tuple[int, int, bool]]) -> bool:
    """Whether a mask says of each (query position, key position) what is given."""
    queries, keys, expected = (torch.tensor(column) for column in zip(*pairs, strict=True))
    zeros = torch.zeros_like(queries)
    try:
        seen = mask(zeros, zeros, queries, keys)
    except (IndexError, RuntimeError, TypeError):
        return False  # it depends on more than positions
    return isinstance(seen, torch.Tensor) and torch.equal(seen.cpu().expand_as(expected), expected)


def lay_out(
    kinds: Sequence[AttentionKind], shapes: Sequence[KVShape], has_state: bool = False
) -> tuple[tuple[LayerPlace, ...], CacheLayout]:
    """Where each layer keeps its keys and values, and the groups.

    A block has as many places as there are layers of full attention, whose blocks stay as long as their request, or
    else layers of the commonest kind; a kind that needs more is split into several groups. So room stays unused only
    in blocks that a window bounds: in the last group of a kind, and where its rows do not fill a place. (Rows wider
    than those of the main kind widen every block.)
    """
    by_kind: dict[AttentionKind, list[int]] = {}
    for number, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(number)
    full = by_kind.pop(FullAttention(), [])
    main = full or max(by_kind.values(), key=len, default=[])
    groups: list[AttentionKind] = []
    places: dict[int, LayerPlace] = {}
    for kind, numbers in [*([(FullAttention(), full)] if full else []), *by_kind.items()]:
        side_by_side = 1 if numbers is main else _fit([shapes[n] for n in main], [shapes[n] for n in numbers])
        per_group = len(main) * side_by_side
        for begin in range(0, len(numbers), per_group):
            for index, number in enumerate(numbers[begin : begin + per_group]):
                place, part = divmod(index, side_by_side)
                places[number] = LayerPlace(len(groups), place, shapes[number], part)
            groups.append(kind)
    return tuple(places[number] for number in range(len(kinds))), CacheLayout(tuple(groups), has_state)


def _fit(places: Sequence[KVShape], layers: Sequence[KVShape]) -> int:
    """How many of the layers, if they are of one shape, stand side by side in each of the places; at least 1."""
    layer = layers[0]
    if any(other != layer for other in layers):
        return 1
    keys = min(shape.num_kv_heads * shape.key_dim for shape in places)
    values = min(shape.num_kv_heads * shape.value_dim for shape in places)
    heads = layer.num_kv_heads
    return max(1, min(keys // (heads * layer.key_dim), values // (heads * layer.value_dim)))
