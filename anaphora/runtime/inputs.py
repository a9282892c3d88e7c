"""From a plan to a step's tensors: everything that is the same for all layers is built here, once.

Knows plans, block tables and the shape of attention calls; knows nothing of models and sampling.
The packed batch holds requests with one new token first (longest first, so that similar lengths share a call),
then the others. The order is free, as each layer writes everything before it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anaphora.core.ids import BlockId, cdiv
from anaphora.core.plan import ScheduledRequest
from anaphora.runtime.attention import AttentionCall

# Sequences share one attention call while the padding costs less than another call would: a call costs about
# as much as a few hundred padded keys, and an eighth of the real keys is not noticed.
PADDING_ALLOWANCE_TOKENS = 256
PADDING_ALLOWANCE_FRACTION = 8


class BlockTables:
    """The block ids of every request, one row each: [max_num_seqs, max blocks] int32, 0 where there is none.

    Rows only grow until they are released. A change costs what it changes, not what is there already.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.ids = torch.zeros((max_num_seqs, cdiv(max_model_len, block_size)), dtype=torch.int32, device=device)
        self.lengths = [0] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def take_row(self) -> int:
        if not self._free_rows:
            raise ValueError(f"more than {len(self.lengths)} requests at once: raise max_num_seqs")
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        self.ids[row, : self.lengths[row]] = 0
        self.lengths[row] = 0
        self._free_rows.append(row)

    def append(self, new_block_ids: Sequence[tuple[int, Sequence[BlockId]]]) -> None:
        """Append ids to rows: (row, ids) pairs."""
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for row, ids in new_block_ids:
            begin = self.lengths[row]
            end = begin + len(ids)
            if end > self.ids.shape[1]:
                raise ValueError(f"a block table of {end} blocks is longer than max_model_len allows")
            rows += [row] * len(ids)
            columns += range(begin, end)
            values += ids
            self.lengths[row] = end
        if values:
            device = self.ids.device
            new = torch.tensor(values, dtype=torch.int32, device=device)
            self.ids[torch.tensor(rows, device=device), torch.tensor(columns, device=device)] = new


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors. T = scheduled tokens, packed.

    input_ids, position_ids: [1, T] int64.
    slot_mapping: [T] int64.
    calls: who attends to what.
    spans: (begin, end) in the packed batch of each scheduled request, in the plan's order.
    sampled: indices into the plan's scheduled requests whose next token is sampled.
    sample_rows: [len(sampled)] int64, the packed token whose logits choose it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slot_mapping: torch.Tensor
    calls: tuple[AttentionCall, ...]
    spans: tuple[tuple[int, int], ...]
    sampled: tuple[int, ...]
    sample_rows: torch.Tensor


def build_inputs(
    scheduled: Sequence[ScheduledRequest], rows: Sequence[int], tables: BlockTables, dtype: torch.dtype
) -> StepInputs:
    """Tensors of one step.

    rows: the block-table row of each scheduled request; the tables cover every scheduled position.
    dtype: of the additive masks; the one that attention computes in.
    """
    block_size, device = tables.block_size, tables.ids.device
    for request, row in zip(scheduled, rows, strict=True):
        if tables.lengths[row] * block_size < request.start + len(request.token_ids):
            raise ValueError(f"the block table of request {request.request_id!r} does not cover its scheduled tokens")
    singles = [i for i, request in enumerate(scheduled) if len(request.token_ids) == 1]
    singles.sort(key=lambda i: scheduled[i].start, reverse=True)
    order = singles + [i for i, request in enumerate(scheduled) if len(request.token_ids) > 1]

    tokens: list[int] = []
    spans: list[tuple[int, int]] = [(0, 0)] * len(scheduled)
    for i in order:
        begin = len(tokens)
        tokens += scheduled[i].token_ids
        spans[i] = (begin, len(tokens))
    lengths = np.array([len(scheduled[i].token_ids) for i in order])
    offsets = np.array([scheduled[i].start - spans[i][0] for i in order])
    positions = np.arange(len(tokens)) + np.repeat(offsets, lengths)
    position_ids = torch.from_numpy(positions).to(device)
    token_rows = torch.from_numpy(np.repeat(np.array([rows[i] for i in order]), lengths)).to(device)
    token_blocks = tables.ids[token_rows, position_ids // block_size].long()

    calls = [
        _single_token_call(begin, [scheduled[i].start + 1 for i in part], [rows[i] for i in part], tables, dtype)
        for begin, part in _split_by_length(singles, [scheduled[i].start + 1 for i in singles])
    ]
    calls += [
        _sequence_call(spans[i], scheduled[i].start, tables.ids[rows[i]], block_size, dtype)
        for i in order[len(singles) :]
    ]
    sampled = tuple(i for i, request in enumerate(scheduled) if request.sample)
    return StepInputs(
        input_ids=torch.tensor(tokens, dtype=torch.int64, device=device).unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        slot_mapping=token_blocks * block_size + position_ids % block_size,
        calls=tuple(calls),
        spans=tuple(spans),
        sampled=sampled,
        sample_rows=torch.tensor([spans[i][1] - 1 for i in sampled], dtype=torch.int64, device=device),
    )


def _split_by_length(indices: Sequence[int], num_keys: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Runs of `indices` (longest first) with little padding in each, as (offset of the run, its indices)."""
    runs: list[tuple[int, list[int]]] = []
    longest = padding = total = 0
    for offset, (index, length) in enumerate(zip(indices, num_keys, strict=True)):
        padding += longest - length
        total += length
        if not runs or padding > PADDING_ALLOWANCE_TOKENS + total // PADDING_ALLOWANCE_FRACTION:
            runs.append((offset, []))
            longest, padding, total = length, 0, length
        runs[-1][1].append(index)
    return runs


def _single_token_call(
    begin: int, num_keys: list[int], rows: list[int], tables: BlockTables, dtype: torch.dtype
) -> AttentionCall:
    """Sequences with one new token each, which sees all `num_keys` of its sequence. Longest first."""
    block_size, device = tables.block_size, tables.ids.device
    width = cdiv(num_keys[0], block_size)
    if len(rows) == 1:
        return AttentionCall(begin, begin + 1, 1, tables.ids[rows[0], :width], num_keys[0])
    lengths = np.array(num_keys)[:, None]
    key_positions = np.arange(width * block_size)[None, :]
    beyond = key_positions >= lengths
    in_last_block = key_positions < -(-lengths // block_size) * block_size
    stale = np.flatnonzero(beyond & in_last_block)
    block_beyond = torch.from_numpy(beyond[:, ::block_size]).to(device)
    # A row may already hold blocks for tokens to come: what the call does not cover reads the null block.
    block_ids = tables.ids[torch.tensor(rows, device=device), :width].masked_fill(block_beyond, 0)
    mask = torch.zeros(beyond.shape, dtype=dtype, device=device)
    mask.masked_fill_(torch.from_numpy(beyond).to(device), -torch.inf)
    return AttentionCall(
        begin,
        begin + len(rows),
        len(rows),
        block_ids.flatten(),
        width * block_size,
        mask=mask[:, None, None, :] if beyond.any() else None,
        stale_slots=torch.from_numpy(stale).to(device) if stale.size else None,
    )


def _sequence_call(
    span: tuple[int, int], start: int, row: torch.Tensor, block_size: int, dtype: torch.dtype
) -> AttentionCall:
    """One sequence with several new tokens: token i sees `start + i + 1` keys."""
    begin, end = span
    num_keys = start + end - begin
    block_ids = row[: cdiv(num_keys, block_size)]
    if start == 0:
        return AttentionCall(begin, end, 1, block_ids, num_keys, is_causal=True)
    # Bottom-right aligned. Additive, in the dtype of attention: a boolean mask is converted anew in each layer.
    mask = torch.full((end - begin, num_keys), -torch.inf, dtype=dtype, device=row.device).triu_(start + 1)
    return AttentionCall(begin, end, 1, block_ids, num_keys, mask=mask)
