"""The block tables of the requests that an executor has admitted, on its device.

Knows rows and block ids; knows nothing of requests, layers and attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from anaphora.core.ids import BlockId, cdiv


class BlockTables:
    """For each group and request a row of block ids: [num_groups, max_num_seqs, max blocks] int32, 0 where none is.

    ids: on the device. on_cpu: the same, and on a CPU the same memory. lengths: [num_groups, max_num_seqs], in blocks.
    Rows only grow until they are released: ids of blocks that the request has given back stay, and are not to be read.
    A change costs what it changes, not what is there already.
    """

    def __init__(
        self, num_groups: int, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size, self.device = block_size, device
        self.on_cpu = np.zeros((num_groups, max_num_seqs, cdiv(max_model_len, block_size)), dtype=np.int32)
        self.ids = torch.from_numpy(self.on_cpu).to(device)
        self.lengths = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs

    def take_row(self) -> int:
        if not self._free_rows:
            raise ValueError(f"more than {self._max_num_seqs} requests at once: raise max_num_seqs")
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        for group, length in enumerate(self.lengths[:, row].tolist()):
            self._write(group, row, 0, np.zeros(length, dtype=np.int32))
        self.lengths[:, row] = 0
        self._free_rows.append(row)

    def append(self, new_block_ids: Sequence[tuple[int, Sequence[Sequence[BlockId]]]]) -> None:
        """Append ids to rows: (row, the ids for each group) pairs."""
        for row, ids_by_group in new_block_ids:
            for group, ids in enumerate(ids_by_group):
                if ids:
                    begin = int(self.lengths[group, row])
                    end = begin + len(ids)
                    if end > self.on_cpu.shape[2]:
                        raise ValueError(f"a block table of {end} blocks is longer than max_model_len allows")
                    self._write(group, row, begin, np.array(ids, dtype=np.int32))
                    self.lengths[group, row] = end

    def _write(self, group: int, row: int, begin: int, ids: npt.NDArray[np.int32]) -> None:
        place = group, row, slice(begin, begin + len(ids))
        self.on_cpu[place] = ids
        if self.device.type != "cpu":
            self.ids[place] = torch.from_numpy(ids).to(self.device)
