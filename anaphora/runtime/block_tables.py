"""The block tables of the requests that an executor has admitted, on its device.

Knows rows and block ids; knows nothing of requests, layers and attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anaphora.core.ids import BlockId, cdiv


class BlockTables:
    """For each group and request a row of block ids: [num_groups, max_num_seqs, max blocks] int32, 0 where none is.

    Rows only grow until they are released: ids of blocks that the request has given back stay, and are not to be read.
    A change costs what it changes, not what is there already.
    """

    def __init__(
        self, num_groups: int, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.ids = torch.zeros(
            (num_groups, max_num_seqs, cdiv(max_model_len, block_size)), dtype=torch.int32, device=device
        )
        self.lengths = [[0] * max_num_seqs for _ in range(num_groups)]
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs

    def take_row(self) -> int:
        if not self._free_rows:
            raise ValueError(f"more than {self._max_num_seqs} requests at once: raise max_num_seqs")
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        for ids, lengths in zip(self.ids, self.lengths, strict=True):
            ids[row, : lengths[row]] = 0
            lengths[row] = 0
        self._free_rows.append(row)

    def append(self, new_block_ids: Sequence[tuple[int, Sequence[Sequence[BlockId]]]]) -> None:
        """Append ids to rows: (row, the ids for each group) pairs."""
        groups: list[int] = []
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for row, ids_by_group in new_block_ids:
            for group, (ids, lengths) in enumerate(zip(ids_by_group, self.lengths, strict=True)):
                begin = lengths[row]
                end = begin + len(ids)
                if end > self.ids.shape[2]:
                    raise ValueError(f"a block table of {end} blocks is longer than max_model_len allows")
                groups += [group] * len(ids)
                rows += [row] * len(ids)
                columns += range(begin, end)
                values += ids
                lengths[row] = end
        if values:
            device = self.ids.device
            places = tuple(torch.tensor(index, device=device) for index in (groups, rows, columns))
            self.ids[places] = torch.tensor(values, dtype=torch.int32, device=device)
