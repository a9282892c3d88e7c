"""From a step's attention calls to the chunks of keys that the CPU kernels share out among threads.

Knows block tables and positions; knows nothing of heads and threads. Contexts are cut at multiples of a fixed number of
tokens; requests whose tables hold the same blocks there share a chunk, which is then read once for all of them. A chunk
within which a window begins is shared with those who see the same keys to its end, or the last ones of them. Each key
keeps its place in the chunk, so that what a token computes does not depend on who shares it.

    positions     0 .... 256 .... 512 .... 768 ..
    a sees                  [ 400 .. 512 [ .. 768 [ .. 780 ]
    b sees                    [ 450 . 512 [ .. 768 [ .. 830 ]     one chunk from 400, of which b skips 50, and one whole
"""

from __future__ import annotations

from bisect import bisect_left
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

    slots: [chunks, chunk_tokens], where each key lies; before the first one that anyone sees stands its slot, too, and
        behind the last one its.
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
    """A chunk while its readers are found.

    start: the position where it would begin, if all of it were seen. begin: of the first key that anyone sees.
    singles: readers that are alone in their call. readers: arrays [4, readers] each, of the others.
    """

    __slots__ = ("begin", "bytes", "readers", "singles", "slots", "start")

    def __init__(self, start: int, begin: int, slots: Int64) -> None:
        self.start = start
        self.begin = begin
        self.slots = slots
        self.bytes = slots.tobytes()
        self.singles: list[tuple[int, int, int, int]] = []
        self.readers: list[Int64] = []

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
    seen = [kind.first_visible(position) for position in positions.tolist()]
    seen_from = np.array(seen, dtype=np.int64)
    first_chunks = seen_from // chunk_tokens
    token_partials = np.zeros(len(seen) + 1, np.int64)
    np.cumsum(positions // chunk_tokens + 1 - first_chunks, out=token_partials[1:])
    partials = token_partials[:-1] - first_chunks  # of a token's chunk 0, if it saw that far
    offsets = np.arange(block_size)
    lines: list[_Line] = []
    known: dict[tuple[int, int, int], list[_Line]] = {}
    for call in calls:
        length = (call.end - call.begin) // call.num_seqs
        tables = call.block_ids.numpy().reshape(call.num_seqs, -1).astype(np.int64) * block_size
        for sequence, first in enumerate(range(call.begin, call.end, length)):
            start, begin = int(positions[first]), seen[first]
            end = start + length
            base = begin // block_size * block_size  # the call's blocks begin with the first one that is seen
            slots = (tables[sequence, : cdiv(end - base, block_size), None] + offsets).ravel()
            for number in range(begin // chunk_tokens, cdiv(end, chunk_tokens)):
                left, right = max(begin, number * chunk_tokens), min(end, (number + 1) * chunk_tokens)
                own = slots[left - base : right - base]
                # Chunks with different ends differ, even where one is the beginning of the other.
                alike = known.setdefault((number, right, int(own[-1])), [])
                line = next((line for line in alike if line.covers(left, own)), None)
                if line is None:
                    line = _Line(number * chunk_tokens, left, own)
                    alike.append(line)
                    lines.append(line)
                if length == 1:
                    line.singles.append((first, left, right, int(partials[first]) + number))
                    continue
                # Those of its tokens that have reached the chunk, and whose window has not passed it.
                reached, passed = first + max(0, left - start), bisect_left(seen, right, first, first + length)
                of = slice(reached, passed)
                readers = np.empty((4, passed - reached), dtype=np.int64)
                readers[0] = np.arange(reached, passed)
                np.maximum(seen_from[of], left, out=readers[1])
                np.minimum(positions[of] + 1, right, out=readers[2])
                np.add(partials[of], number, out=readers[3])
                line.readers.append(readers)
    padded = np.empty((len(lines), chunk_tokens), dtype=np.int64)
    flat: list[Int64] = []
    ends: list[int] = []
    for row, line in zip(padded, lines, strict=True):
        first, last = line.begin - line.start, line.begin - line.start + len(line.slots)
        row[:first] = line.slots[0]
        row[first:last] = line.slots
        row[last:] = line.slots[-1]
        alone = np.array(line.singles, dtype=np.int64).reshape(-1, 4).T
        readers = np.concatenate((alone, *line.readers), axis=1) if line.readers else alone
        readers[1:3] -= line.start
        flat.append(readers)
        ends.append(readers.shape[1])
    tokens, seen_first, visible, results = np.concatenate(flat, axis=1)
    items = np.zeros((len(lines), 2), dtype=np.int64)
    np.cumsum(ends, out=items[:, 1])
    items[1:, 0] = items[:-1, 1]
    return Chunks(padded, items, tokens, seen_first, visible, results, token_partials)


@dataclass(frozen=True, slots=True)
class GroupedChunks:
    """The chunks of all groups, one group after another.

    groups: [groups + 1], where each group's chunks begin in `items` and `slots`.
    token_partials: [groups, tokens + 1]; the groups' layers follow each other, so each group counts from 0.
    work: [chunks + 1], what all chunks before each one cost, in keys that one query reads.
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
    work: Int64


_KEY_COST = 8
"""What it costs to bring a key and its value together, in queries that read them; measured."""


def join(groups: Sequence[Chunks]) -> GroupedChunks:
    num_readers = np.cumsum([0, *(len(each.tokens) for each in groups)])
    items = np.concatenate([each.items + offset for each, offset in zip(groups, num_readers[:-1], strict=True)])
    first, visible = (np.concatenate(parts) for parts in zip(*((g.first, g.visible) for g in groups), strict=True))
    num_keys = np.maximum.reduceat(visible, items[:, 0]) - np.minimum.reduceat(first, items[:, 0])
    work = np.zeros(len(items) + 1, np.int64)
    np.cumsum(num_keys * (_KEY_COST + items[:, 1] - items[:, 0]), out=work[1:])
    return GroupedChunks(
        groups=np.cumsum([0, *(len(each.items) for each in groups)]),
        slots=np.concatenate([each.slots for each in groups]),
        items=items,
        tokens=np.concatenate([each.tokens for each in groups]),
        first=first,
        visible=visible,
        partials=np.concatenate([each.partials for each in groups]),
        token_partials=np.stack([each.token_partials for each in groups]),
        work=work,
    )
