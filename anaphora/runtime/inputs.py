"""From a plan to a step's tensors: everything that is the same for several layers is built here, once.

Knows plans and block tables; knows nothing of models and sampling.
The packed batch holds requests with one new token first (longest first, so that similar lengths share a call),
then the others. The order is free, as each layer writes everything before it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anaphora.core.groups import AttentionKind
from anaphora.core.plan import ScheduledRequest
from anaphora.runtime.attention import GroupInputs
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.call_shapes import Span, call_shapes


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors. T = scheduled tokens, packed.

    input_ids, position_ids: [1, T] int64.
    groups: where the layers of each group write, and who attends to what.
    sequences: the new tokens of each scheduled request in the order of the packed batch, those with one token first.
    spans: (begin, end) in the packed batch of each scheduled request, in the plan's order.
    sampled: indices into the plan's scheduled requests whose next token is sampled.
    sample_rows: [len(sampled)] int64, the packed token whose logits choose it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    groups: tuple[GroupInputs, ...]
    sequences: tuple[Span, ...]
    spans: tuple[tuple[int, int], ...]
    sampled: tuple[int, ...]
    sample_rows: torch.Tensor


def build_inputs(
    scheduled: Sequence[ScheduledRequest],
    rows: Sequence[int],
    tables: BlockTables,
    kinds: Sequence[AttentionKind],
    dtype: torch.dtype,
) -> StepInputs:
    """Tensors of one step.

    rows: the block-table row of each scheduled request; the tables cover every scheduled position.
    kinds: of each group. dtype: of the additive masks; the one that attention computes in.
    """
    block_size, device = tables.block_size, tables.ids.device
    for request, row in zip(scheduled, rows, strict=True):
        end = request.start + len(request.token_ids)
        if any(lengths[row] * block_size < end for lengths in tables.lengths):
            raise ValueError(f"the block table of request {request.request_id!r} does not cover its scheduled tokens")
    singles = [i for i, request in enumerate(scheduled) if len(request.token_ids) == 1]
    singles.sort(key=lambda i: scheduled[i].start, reverse=True)
    order = singles + [i for i, request in enumerate(scheduled) if len(request.token_ids) > 1]

    tokens: list[int] = []
    packed: list[Span] = []
    spans: list[tuple[int, int]] = [(0, 0)] * len(scheduled)
    for i in order:
        request = scheduled[i]
        packed.append(Span(rows[i], len(tokens), request.start, len(request.token_ids)))
        tokens += request.token_ids
        spans[i] = (packed[-1].begin, len(tokens))
    lengths = np.array([span.num_tokens for span in packed])
    offsets = np.array([span.start - span.begin for span in packed])
    position_ids = torch.from_numpy(np.arange(len(tokens)) + np.repeat(offsets, lengths)).to(device)
    token_rows = torch.from_numpy(np.repeat(np.array([span.row for span in packed]), lengths)).to(device)
    token_blocks = tables.ids[:, token_rows, position_ids // block_size].long()
    slot_mappings = token_blocks * block_size + position_ids % block_size

    shapes = {kind: call_shapes(packed, kind, block_size, dtype, device) for kind in dict.fromkeys(kinds)}
    groups = tuple(
        GroupInputs(slots, tuple(shape.call(ids) for shape in shapes[kind]))
        for kind, slots, ids in zip(kinds, slot_mappings, tables.ids, strict=True)
    )
    sampled = tuple(i for i, request in enumerate(scheduled) if request.sample)
    return StepInputs(
        input_ids=torch.tensor(tokens, dtype=torch.int64, device=device).unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        groups=groups,
        sequences=tuple(packed),
        spans=tuple(spans),
        sampled=sampled,
        sample_rows=torch.tensor([spans[i][1] - 1 for i in sampled], dtype=torch.int64, device=device),
    )
