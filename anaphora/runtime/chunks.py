"""From a step's block tables to the chunks of keys that the CPU kernels share out among threads.

Knows block tables and positions; knows nothing of heads and threads. Contexts are cut at multiples of a fixed number of
tokens; requests whose tables hold the same blocks there share a chunk, which is then read once for all of them. A chunk
within which a window begins is shared with those who see the same keys to its end, or the last ones of them. Each key
keeps its place in the chunk, so that what a token computes does not depend on who shares it.

    positions     0 .... 256 .... 512 .... 768 ..
    a sees                  [ 400 .. 512 [ .. 768 [ .. 780 ]
    b sees                    [ 450 . 512 [ .. 768 [ .. 830 ]     one chunk from 400, of which b skips 50, and one whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anaphora.core.groups import AttentionKind
from anaphora.runtime.attention import GroupInputs
from anaphora.runtime.kernels.chunks import cut

Int64 = npt.NDArray[np.int64]

_KEY_COST = 8
"""What it costs to bring a key and its value together, in queries that read them; measured."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Who reads what, for all layers of a group alike; the chunks of all groups, one group after another.

    groups: [groups + 1], where each group's chunks begin in `items` and `slots`.
    slots: [chunks, chunk_tokens], where each key lies; before the first one that anyone sees stands its slot, too, and
        behind the last one its.
    items: [chunks, 2], each chunk's entries [begin, end) in the four arrays that follow.
    tokens, first, visible, partials: a token of the packed batch, the first of the chunk's keys that it sees and the
        one after the last, and the number of its result for this chunk.
    token_partials: [groups, tokens + 1]: a token t has the results [token_partials[g, t], token_partials[g, t + 1]), in
        order. The groups' layers follow each other, so each group counts from 0.
    work: [chunks + 1], what all chunks before each one cost, in keys that one query reads.
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


def cut_into_chunks(
    groups: Sequence[GroupInputs], kinds: Sequence[AttentionKind], positions: Int64, block_size: int, chunk_tokens: int
) -> Chunks:
    """groups: of one step. kinds: of each of them. positions: of each token of the packed batch.
    chunk_tokens: of a chunk."""
    seen = {kind: [kind.first_visible(position) for position in positions.tolist()] for kind in dict.fromkeys(kinds)}
    starts, slots, items, readers, token_partials, work = cut(
        np.array(groups[0].sequences, dtype=np.int64)[:, 1:],
        np.stack([group.block_ids for group in groups]),
        np.array([seen[kind] for kind in kinds], dtype=np.int64),
        block_size,
        chunk_tokens,
        _KEY_COST,
    )
    tokens, first, visible, partials = readers
    return Chunks(starts, slots, items, tokens, first, visible, partials, token_partials, work)
