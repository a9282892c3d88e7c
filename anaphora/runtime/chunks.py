"""From a step's attention calls to the chunks of keys that the CPU kernels share out among threads.

Knows block tables and positions; knows nothing of heads and threads. Contexts are cut at multiples of a fixed number of
tokens; requests whose tables hold the same blocks there share a chunk, which is then read once for all of them. Where a
window begins within a chunk, the chunk begins there, too: it is shared with those who see the same keys to its end, or
the last ones of them.

    positions     0 .... 256 .... 512 .... 768 ..
    a sees                  [ 400 .. 512 [ .. 768 [ .. 780 ]
    b sees                    [ 450 . 512 [ .. 768 [ .. 830 ]     one chunk from 400, of which b skips 50, and one whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anaphora.core.groups import AttentionKind, FullAttention
from anaphora.core.ids import cdiv
from anaphora.runtime.attention import AttentionCall

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Who reads what, for all layers alike.

    slots: [chunks, chunk_tokens], where each key lies; behind a chunk's end its last slot goes on.
    items: [chunks, 2], each chunk's entries [begin, end) in the four arrays that follow.
    tokens, first, visible, partials: a token of the packed batch, the first of the chunk's keys that it sees and the
        one after the last, and the number of its result for this chunk.
    token_partials: [tokens + 1]: a token t has the results [token_partials[t], token_partials[t + 1]), in order.
    """

    slots: Int64
    items: Int64
    tokens: Int64
    first: Int64
    visible: Int64
    partials: Int64
    token_partials: Int64


class _Line:
    """A chunk while its readers are found. begin: the position of its first key."""

    def __init__(self, begin: int, slots: Int64) -> None:
        self.begin = begin
        self.slots = slots
        self.bytes = slots.tobytes()
        self.readers: list[tuple[int, int, int, int]] = []

    def covers(self, begin: int, slots: Int64) -> bool:
        """Whether these slots are the last ones of its own, or its own the last ones of them: then it takes them in."""
        if len(slots) <= len(self.slots):
            return self.bytes.endswith(slots.tobytes())
        if not slots.tobytes().endswith(self.bytes):
            return False
        self.begin, self.slots, self.bytes = begin, slots, slots.tobytes()
        return True


def cut_into_chunks(
    calls: Sequence[AttentionCall],
    positions: Int64,
    block_size: int,
    chunk_tokens: int,
    kind: AttentionKind | None = None,
) -> Chunks:
    """positions: of each token of the packed batch. chunk_tokens: tokens of a chunk. kind: None is full attention."""
    kind = kind or FullAttention()
    seen_from = np.array([kind.first_visible(position) for position in positions.tolist()], dtype=np.int64)
    first_chunks = seen_from // chunk_tokens
    num_chunks = positions // chunk_tokens + 1 - first_chunks
    token_partials = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_chunks)])
    lines: list[_Line] = []
    known: dict[tuple[int, int, int], list[_Line]] = {}
    for call in calls:
        length = (call.end - call.begin) // call.num_seqs
        tables = call.block_ids.numpy().reshape(call.num_seqs, -1).astype(np.int64)
        for sequence in range(call.num_seqs):
            first = call.begin + sequence * length
            end = int(positions[first + length - 1]) + 1
            begin = int(seen_from[first])
            base = begin // block_size * block_size  # the call's blocks begin with the first one that is seen
            blocks = tables[sequence, : cdiv(end - base, block_size)]
            slots = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
            for number in range(begin // chunk_tokens, cdiv(end, chunk_tokens)):
                left, right = max(begin, number * chunk_tokens), min(end, (number + 1) * chunk_tokens)
                own = slots[left - base : right - base]
                # Chunks with different ends differ, even where one is the beginning of the other.
                alike = known.setdefault((number, right, int(own[-1])), [])
                line = next((line for line in alike if line.covers(left, own)), None)
                if line is None:
                    line = _Line(left, own)
                    alike.append(line)
                    lines.append(line)
                for token in range(first, first + length):
                    low, high = max(int(seen_from[token]), left), min(int(positions[token]) + 1, right)
                    if low < high:
                        partial = int(token_partials[token]) + number - int(first_chunks[token])
                        line.readers.append((token, low, high, partial))
    padded = np.stack([np.pad(line.slots, (0, chunk_tokens - len(line.slots)), mode="edge") for line in lines])
    ends = np.cumsum([len(line.readers) for line in lines])
    begins = np.repeat([line.begin for line in lines], [len(line.readers) for line in lines])
    flat = np.array([entry for line in lines for entry in line.readers], dtype=np.int64)
    return Chunks(
        slots=padded,
        items=np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1).astype(np.int64),
        tokens=np.ascontiguousarray(flat[:, 0]),
        first=flat[:, 1] - begins,
        visible=flat[:, 2] - begins,
        partials=np.ascontiguousarray(flat[:, 3]),
        token_partials=token_partials,
    )


@dataclass(frozen=True, slots=True)
class GroupedChunks:
    """The chunks of all groups, one group after another.

    groups: [groups + 1], where each group's chunks begin in `items` and `slots`.
    token_partials: [groups, tokens + 1]; the groups' layers follow each other, so each group counts from 0.
    Others: as of Chunks.
    """

    groups: Int64
    slots: Int64
    items: Int64
    tokens: Int64
    first: Int64
    visible: Int64
    partials: Int64
    token_partials: Int64


def join(groups: Sequence[Chunks]) -> GroupedChunks:
    num_readers = np.cumsum([0, *(len(each.tokens) for each in groups)])
    return GroupedChunks(
        groups=np.cumsum([0, *(len(each.items) for each in groups)]),
        slots=np.concatenate([each.slots for each in groups]),
        items=np.concatenate([each.items + offset for each, offset in zip(groups, num_readers[:-1], strict=True)]),
        tokens=np.concatenate([each.tokens for each in groups]),
        first=np.concatenate([each.first for each in groups]),
        visible=np.concatenate([each.visible for each in groups]),
        partials=np.concatenate([each.partials for each in groups]),
        token_partials=np.stack([each.token_partials for each in groups]),
    )
