"""Which sequences of a packed batch share an attention call, and which keys each of their tokens sees.

Knows positions, blocks and attention kinds; knows nothing of block ids. What depends on the kind alone, masks above
all, is built once and serves every group of that kind; a group's block table then makes it an AttentionCall. All of it
is built when somebody first looks, as kernels that read block tables themselves never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from anaphora.core.groups import AttentionKind
from anaphora.core.ids import cdiv
from anaphora.runtime.attention import AttentionCall, Span

# Sequences share one attention call while the padding costs less than another call would: a call costs about
# as much as a few hundred padded keys, and an eighth of the real keys is not noticed.
PADDING_ALLOWANCE_TOKENS = 256
PADDING_ALLOWANCE_FRACTION = 8


@dataclass(frozen=True, slots=True)
class OneSequence:
    """A call of one sequence. first_block, end_block: the blocks of its table that the call reads. Others: there."""

    span: Span
    first_block: int
    end_block: int
    num_unseen: int
    num_keys: int
    is_causal: bool
    mask: torch.Tensor | None

    def call(self, ids: torch.Tensor) -> AttentionCall:
        """ids: a group's tables, [max_num_seqs, max blocks]."""
        return AttentionCall(
            self.span.begin,
            self.span.begin + self.span.num_tokens,
            1,
            ids[self.span.row, self.first_block : self.end_block],
            self.num_keys,
            num_unseen=self.num_unseen,
            is_causal=self.is_causal,
            mask=self.mask,
        )


@dataclass(frozen=True, slots=True)
class SingleTokens:
    """A call of several sequences with one new token each.

    rows, columns: [num_seqs, 1] and [num_seqs, n], where the blocks stand in the tables. beyond: [num_seqs, n] bool,
        columns that the sequence does not read, although its table may have a block there.
    """

    begin: int
    rows: torch.Tensor
    columns: torch.Tensor
    beyond: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None
    stale_slots: torch.Tensor | None

    def call(self, ids: torch.Tensor) -> AttentionCall:
        """ids: a group's tables, [max_num_seqs, max blocks]."""
        num_seqs = len(self.rows)
        return AttentionCall(
            self.begin,
            self.begin + num_seqs,
            num_seqs,
            ids[self.rows, self.columns].masked_fill(self.beyond, 0).flatten(),
            self.num_keys,
            mask=self.mask,
            stale_slots=self.stale_slots,
        )


CallShape = OneSequence | SingleTokens

Item = TypeVar("Item")


class MadeWhenAsked(Sequence[Item]):
    """What `make` gives, once somebody looks."""

    def __init__(self, make: Callable[[], Sequence[Item]]) -> None:
        self._make = make

    @cached_property
    def _items(self) -> Sequence[Item]:
        return self._make()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)


def group_calls(shapes: Sequence[CallShape], ids: torch.Tensor) -> Sequence[AttentionCall]:
    """ids: the group's tables, [max_num_seqs, max blocks]."""
    return MadeWhenAsked(lambda: [shape.call(ids) for shape in shapes])


def call_shapes(
    spans: Sequence[Span], kind: AttentionKind, block_size: int, dtype: torch.dtype, device: torch.device
) -> Sequence[CallShape]:
    """spans: in the packed order, those of one token first. dtype: of the additive masks."""
    return MadeWhenAsked(lambda: _call_shapes(spans, kind, block_size, dtype, device))


def _call_shapes(
    spans: Sequence[Span], kind: AttentionKind, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[CallShape]:
    singles = [span for span in spans if span.num_tokens == 1]
    shapes: list[CallShape] = []
    for run in _runs(singles, kind, block_size):
        if len(run) == 1:
            shapes.append(_one_sequence(run[0], kind, block_size, dtype, device))
        else:
            shapes.append(_single_tokens(run, kind, block_size, dtype, device))
    for span in spans[len(singles) :]:
        shapes.append(_one_sequence(span, kind, block_size, dtype, device))
    return shapes


def _runs(singles: Sequence[Span], kind: AttentionKind, block_size: int) -> list[list[Span]]:
    """`singles` cut where a longer run would pad too much."""
    runs: list[list[Span]] = []
    longest = total = 0
    for span in singles:
        num_keys = span.start + 1 - kind.first_visible(span.start) // block_size * block_size
        longest, total = max(longest, num_keys), total + num_keys
        padding = longest * (len(runs[-1]) + 1) - total if runs else 0
        if not runs or padding > PADDING_ALLOWANCE_TOKENS + total // PADDING_ALLOWANCE_FRACTION:
            runs.append([])
            longest = total = num_keys
        runs[-1].append(span)
    return runs


def _one_sequence(
    span: Span, kind: AttentionKind, block_size: int, dtype: torch.dtype, device: torch.device
) -> OneSequence:
    end = span.start + span.num_tokens
    first_key = kind.first_visible(span.start)
    first_block = first_key // block_size
    num_keys = end - first_key
    cuts = kind.first_visible(end - 1) > first_key  # a later token does not see the first key
    is_causal = first_key == span.start and not cuts
    mask = None
    if span.num_tokens > 1 and not is_causal:
        # Bottom-right aligned. Additive, in the dtype of attention: a boolean mask is converted anew in each layer.
        mask = torch.full((span.num_tokens, num_keys), -torch.inf, dtype=dtype, device=device)
        mask.triu_(span.start - first_key + 1)
        if cuts:
            seen_from = [kind.first_visible(position) - first_key for position in range(span.start, end)]
            keys = torch.arange(num_keys, device=device)
            mask.masked_fill_(keys < torch.tensor(seen_from, device=device).unsqueeze(1), -torch.inf)
    return OneSequence(
        span,
        first_block,
        cdiv(end, block_size),
        num_unseen=first_key - first_block * block_size,
        num_keys=num_keys,
        is_causal=is_causal and span.num_tokens > 1,
        mask=mask,
    )


def _single_tokens(
    run: Sequence[Span], kind: AttentionKind, block_size: int, dtype: torch.dtype, device: torch.device
) -> SingleTokens:
    positions = np.array([span.start for span in run])[:, None]
    seen_from = np.array([kind.first_visible(span.start) for span in run])[:, None]
    first_blocks = seen_from // block_size
    columns = first_blocks + np.arange(int((positions // block_size - first_blocks).max()) + 1)
    beyond = columns > positions // block_size
    keys = (columns[:, :, None] * block_size + np.arange(block_size)).reshape(len(run), -1)
    hidden = (keys > positions) | (keys < seen_from)
    stale = np.flatnonzero((keys > positions) & (keys // block_size == positions // block_size))
    mask = None
    if hidden.any():
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask.masked_fill_(torch.from_numpy(hidden).to(device), -torch.inf)
        mask = mask[:, None, None, :]
    return SingleTokens(
        run[0].begin,
        torch.tensor([[span.row] for span in run], device=device),
        # The table may end before a column that the sequence does not read.
        torch.from_numpy(np.where(beyond, 0, columns)).to(device),
        torch.from_numpy(beyond).to(device),
        num_keys=keys.shape[1],
        mask=mask,
        stale_slots=torch.from_numpy(stale).to(device) if stale.size else None,
    )
