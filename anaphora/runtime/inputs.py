"""From a plan to a step's tensors: everything that is the same for several layers is built here, once.

Knows plans and block tables; knows nothing of models and sampling.
The packed batch holds requests with one new token first (longest first, so that similar lengths share a call),
then the others. The order is free, as each layer writes everything before it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from anaphora.core.groups import AttentionKind
from anaphora.core.plan import ScheduledRequest
from anaphora.runtime.attention import GroupInputs, Span
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.call_shapes import call_shapes, group_calls


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
    block_size, device = tables.block_size, tables.device
    counts = [len(request.token_ids) for request in scheduled]
    singles = [i for i, count in enumerate(counts) if count == 1]
    singles.sort(key=lambda i: scheduled[i].start, reverse=True)
    order = singles + [i for i, count in enumerate(counts) if count > 1]

    tokens: list[int] = []
    packed: list[Span] = []
    spans: list[tuple[int, int]] = [(0, 0)] * len(scheduled)
    for i in order:
        request = scheduled[i]
        packed.append(Span(rows[i], len(tokens), request.start, counts[i]))
        tokens += request.token_ids
        spans[i] = (packed[-1].begin, len(tokens))
    sequences = tuple(packed)
    row_of, begins, starts, lengths = np.array(sequences).T
    num_blocks = -(-(starts + lengths) // block_size)
    for i, is_short in zip(order, (tables.lengths[:, row_of] < num_blocks).any(axis=0), strict=True):
        if is_short:
            request_id = scheduled[i].request_id
            raise ValueError(f"the block table of request {request_id!r} does not cover its scheduled tokens")
    positions = np.arange(len(tokens)) + np.repeat(starts - begins, lengths)
    sequence_of = np.repeat(np.arange(len(sequences)), lengths)
    columns, offsets = np.divmod(positions, block_size)

    shapes = {kind: call_shapes(sequences, kind, block_size, dtype, device) for kind in dict.fromkeys(kinds)}

    def group_inputs(kind: AttentionKind, table: npt.NDArray[np.int32], ids: torch.Tensor) -> GroupInputs:
        block_ids = table[row_of, : num_blocks.max()]
        slots = block_ids[sequence_of, columns].astype(np.int64) * block_size + offsets
        return GroupInputs(torch.from_numpy(slots).to(device), group_calls(shapes[kind], ids), sequences, block_ids)

    sampled = tuple(i for i, request in enumerate(scheduled) if request.sample)
    return StepInputs(
        input_ids=torch.from_numpy(np.array([tokens])).to(device),
        position_ids=torch.from_numpy(positions[None]).to(device),
        groups=tuple(map(group_inputs, kinds, tables.on_cpu, tables.ids)),
        sequences=sequences,
        spans=tuple(spans),
        sampled=sampled,
        sample_rows=torch.from_numpy(np.array([spans[i][1] - 1 for i in sampled], dtype=np.int64)).to(device),
    )
