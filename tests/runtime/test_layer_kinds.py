"""Claims: what a layer sees is read off its mask; layers are laid out so that no block of full attention has gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_llama import make_tiny_llama
from windowed_models import CHUNKED, FAMILIES, FULL, SLIDING, gemma3, gpt_oss, make_windowed, mistral

from anaphora.core.groups import AttentionKind, CacheLayout, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.agreement import check_agreement
from anaphora.runtime.architecture import check_context, inspect_model
from anaphora.runtime.kv_cache import KVShape, bytes_per_block, bytes_per_token
from anaphora.runtime.layer_kinds import SeenLayer, kind_of, lay_out

SHAPE = KVShape(2, 16, 16)


def places(layout: Any) -> list[tuple[int, int]]:
    assert all(place.part == 0 for place in layout.places)
    return [(place.group, place.place) for place in layout.places]


@pytest.mark.parametrize(
    ("family", "groups", "expected"),
    [
        ("mistral", (SlidingWindow(24),), [(0, 0), (0, 1)]),
        (
            "gemma3",
            (FullAttention(), *[SlidingWindow(24)] * 3),
            [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1), (3, 0)],
        ),
        ("gpt_oss", (FullAttention(), SlidingWindow(24)), [(1, 0), (0, 0), (1, 1), (0, 1)]),
        ("llama4", (FullAttention(), *[ChunkedAttention(24)] * 3), [(1, 0), (2, 0), (3, 0), (0, 0)]),
        ("qwen3", (FullAttention(), *[SlidingWindow(24)] * 2), [(0, 0), (1, 0), (2, 0)]),
    ],
)
def test_the_groups_of_a_model(family: str, groups: tuple[AttentionKind, ...], expected: list[tuple[int, int]]) -> None:
    layout = inspect_model(FAMILIES[family](24), 512)
    assert layout.cache == CacheLayout(groups)
    assert places(layout) == expected


def test_layers_with_half_the_rows_stand_side_by_side_in_a_place() -> None:
    layout = inspect_model(FAMILIES["gemma4"](24), 512)
    assert layout.cache == CacheLayout((FullAttention(), SlidingWindow(24), SlidingWindow(24)))
    assert [(place.group, place.place, place.part) for place in layout.places] == [
        (1, 0, 0),
        (1, 0, 1),
        (2, 0, 0),
        (0, 0, 0),
    ]
    assert bytes_per_token(layout.places, torch.float32) == (512, 512, 256)
    assert bytes_per_block(layout.places, 1, torch.float32) == 512


@pytest.mark.parametrize(
    ("full", "windowed", "groups"),
    [
        (KVShape(2, 16, 16), KVShape(2, 8, 8), [1, 1, 1]),  # two in each of the two places
        (KVShape(2, 16, 16), KVShape(1, 16, 8), [1, 1, 1]),
        (KVShape(2, 16, 8), KVShape(2, 8, 8), [1, 1, 2]),  # the values have no room
        (KVShape(2, 23, 23), KVShape(2, 12, 12), [1, 1, 2]),
        (KVShape(1, 8, 8), KVShape(2, 16, 16), [1, 1, 2]),  # the place is as wide as the windowed layers
    ],
)
def test_only_whole_layers_stand_side_by_side(full: KVShape, windowed: KVShape, groups: list[int]) -> None:
    layers, _ = lay_out([FULL_24, FULL_24, *[WINDOW_24] * 3], [full, full, *[windowed] * 3])
    assert [layer.group for layer in layers[2:]] == groups
    assert len({(layer.group, layer.place, layer.part) for layer in layers}) == 5


def test_layers_of_different_rows_share_no_place() -> None:
    """Side by side they would overlap."""
    narrow, middle = KVShape(2, 4, 4), KVShape(2, 8, 8)
    layers, _ = lay_out([FULL_24, WINDOW_24, WINDOW_24], [SHAPE, middle, narrow])
    assert [(layer.group, layer.place, layer.part) for layer in layers] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


def test_a_window_of_the_context_is_full_attention() -> None:
    module = gpt_oss(24)
    assert inspect_model(module, 25).cache == CacheLayout((FullAttention(), SlidingWindow(24)))
    assert inspect_model(module, 24).cache == CacheLayout((FullAttention(),))
    assert places(inspect_model(module, 24)) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_a_config_without_words_for_it_is_full_attention() -> None:
    assert inspect_model(make_tiny_llama(), 512).cache == CacheLayout()


def test_bytes_per_token_are_what_each_group_writes() -> None:
    layout = inspect_model(gemma3(24), 512)
    assert bytes_per_token(layout.places, torch.float32) == (512, 512, 512, 256)
    assert bytes_per_block(layout.places, 16, torch.float32) == 16 * 512


FULL_24, WINDOW_24, CHUNK_24 = FullAttention(), SlidingWindow(24), ChunkedAttention(24)


def mask_of(kind: AttentionKind) -> Any:
    def mask(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        first = torch.tensor([kind.first_visible(position) for position in query.tolist()])
        return (key <= query) & (key >= first)

    return mask


@pytest.mark.parametrize("truth", [FULL_24, WINDOW_24, CHUNK_24])
@pytest.mark.parametrize("layer_type", [None, FULL, SLIDING, CHUNKED])
@pytest.mark.parametrize("window", [None, 24, 99])
def test_the_mask_decides_whatever_the_words_say(
    window: int | None, layer_type: str | None, truth: AttentionKind
) -> None:
    config = transformers.PreTrainedConfig(sliding_window=24, attention_chunk_size=24)
    assert kind_of(SeenLayer("L", SHAPE, window, layer_type, mask_of(truth)), config, 512) == truth


def test_without_a_mask_the_argument_goes_before_the_type() -> None:
    config = transformers.PreTrainedConfig(sliding_window=24, attention_chunk_size=30)
    for window, layer_type, kind in (
        (7, FULL, SlidingWindow(7)),
        (None, SLIDING, WINDOW_24),
        (None, CHUNKED, ChunkedAttention(30)),
        (None, FULL, FULL_24),
        (None, None, FULL_24),
        (0, None, FULL_24),
        (512, None, FULL_24),
    ):
        assert kind_of(SeenLayer("L", SHAPE, window, layer_type, None), config, 512) == kind


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (mask_of(SlidingWindow(23)), "L has a mask that is neither causal, nor a sliding window or chunk"),
        (mask_of(SlidingWindow(25)), "L has a mask that is neither causal"),
        (mask_of(ChunkedAttention(48)), "L has a mask that is neither causal"),
        (lambda batch, head, query, key: key >= 0, "L sees later tokens, as an encoder does"),
        (lambda batch, head, query, key: torch.ones(4, dtype=torch.bool)[query] & (key <= query), "L has a mask"),
    ],
)
def test_other_masks_are_refused(mask: Any, reason: str) -> None:
    config = transformers.PreTrainedConfig(sliding_window=24, attention_chunk_size=24)
    with pytest.raises(UnsupportedModelError, match=reason):
        kind_of(SeenLayer("L", SHAPE, 24, SLIDING, mask), config, 512)


def test_a_type_without_a_size_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="L is of type sliding_attention, and its config does not say"):
        kind_of(SeenLayer("L", SHAPE, None, SLIDING, None), transformers.PreTrainedConfig(), 512)


@pytest.mark.parametrize(
    ("kinds", "groups", "expected"),
    [
        ([FULL_24] * 3, [FULL_24], [(0, 0), (0, 1), (0, 2)]),
        ([WINDOW_24, CHUNK_24, CHUNK_24], [WINDOW_24, CHUNK_24], [(0, 0), (1, 0), (1, 1)]),
        ([WINDOW_24, FULL_24, FULL_24], [FULL_24, WINDOW_24], [(1, 0), (0, 0), (0, 1)]),
        ([], [], []),
    ],
)
def test_a_block_has_as_many_places_as_there_are_full_layers(
    kinds: list[AttentionKind], groups: list[AttentionKind], expected: list[tuple[int, int]]
) -> None:
    layers, cache = lay_out(kinds, [SHAPE] * len(kinds), has_state=not kinds)
    assert [(layer.group, layer.place) for layer in layers] == expected
    assert list(cache.groups) == groups


@pytest.mark.parametrize("change", [1, -1])
def test_a_small_window_that_is_taken_for_another_is_found_out_by_computing(change: int) -> None:
    """Where a class makes its mask without the library, nothing but its results says how far it sees."""
    module, other = mistral(24), mistral(24 + change)
    check_agreement(module, inspect_model(module, 512))
    with pytest.raises(UnsupportedModelError, match="other results through the paged attention"):
        check_agreement(module, inspect_model(other, 512))


def test_queries_scaled_by_their_place_in_the_batch_limit_the_context() -> None:
    module = make_windowed(
        "Llama4TextConfig", "Llama4ForCausalLM", num_hidden_layers=4, intermediate_size_mlp=96, floor_scale=100
    )
    check_context(module, 99)
    with pytest.raises(UnsupportedModelError, match=r"set max_model_len to 99 or less \(it is 100\)"):
        check_context(module, 100)
