"""From a step's attention calls to the chunks of keys that the CPU kernels share out among threads.

Knows block tables and positions; knows nothing of heads and threads. Contexts are cut at multiples of a fixed number of
tokens; requests whose tables hold the same blocks there share a chunk, which is then read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anaphora.core.ids import cdiv
from anaphora.runtime.attention import AttentionCall

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Who reads what, for all layers alike.

    slots: [chunks, chunk_tokens], where each key lies; behind a chunk's end its last slot goes on.
    items: [chunks, 2], each chunk's entries [begin, end) in the three arrays that follow.
    tokens, visible, partials: a token of the packed batch, how many of the chunk's keys it sees (from the first one),
        and the number of its result for this chunk.
    token_partials: [tokens + 1]: a token t has the results [token_partials[t], token_partials[t + 1]), in order.
    """

    slots: Int64
    items: Int64
    tokens: Int64
    visible: Int64
    partials: Int64
    token_partials: Int64


def cut_into_chunks(calls: Sequence[AttentionCall], positions: Int64, block_size: int, chunk_tokens: int) -> Chunks:
    """positions: of each token of the packed batch. chunk_tokens: tokens of a chunk."""
    num_chunks = positions // chunk_tokens + 1
    token_partials = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_chunks)])
    lines: list[Int64] = []
    readers: list[list[tuple[int, int, int]]] = []
    known: dict[tuple[int, bytes], int] = {}
    for call in calls:
        length = (call.end - call.begin) // call.num_seqs
        tables = call.block_ids.numpy().reshape(call.num_seqs, -1).astype(np.int64)
        for sequence in range(call.num_seqs):
            first = call.begin + sequence * length
            last = int(positions[first + length - 1])
            blocks = tables[sequence, : cdiv(last + 1, block_size)]
            slots = (blocks[:, None] * block_size + np.arange(block_size)).ravel()[: last + 1]
            for number in range(cdiv(last + 1, chunk_tokens)):
                line = slots[number * chunk_tokens : (number + 1) * chunk_tokens]
                # Chunks of different lengths differ, even where one is the beginning of the other.
                key = (number, line.tobytes())
                place = known.setdefault(key, len(lines))
                if place == len(lines):
                    lines.append(line)
                    readers.append([])
                for token in range(first, first + length):
                    seen = min(int(positions[token]) + 1 - number * chunk_tokens, len(line))
                    if seen > 0:
                        readers[place].append((token, seen, int(token_partials[token]) + number))
    padded = np.stack([np.pad(line, (0, chunk_tokens - len(line)), mode="edge") for line in lines])
    ends = np.cumsum([len(entries) for entries in readers])
    flat = np.array([entry for entries in readers for entry in entries], dtype=np.int64)
    return Chunks(
        slots=padded,
        items=np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1).astype(np.int64),
        tokens=np.ascontiguousarray(flat[:, 0]),
        visible=np.ascontiguousarray(flat[:, 1]),
        partials=np.ascontiguousarray(flat[:, 2]),
        token_partials=token_partials,
    )
