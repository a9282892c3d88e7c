"""Attention over the pool for few new tokens: a context is cut into chunks of tokens, which threads share out.

Knows addresses, rows and chunks; knows nothing of blocks and requests. All heads of a chunk are one thread's work, so
that a chunk's keys and values are read from memory once, whoever asks for them. Each (chunk, new token, head) leaves a
partial result: the largest score, the sum of exponentials and the unnormalised values. The chunks' borders do not
depend on the number of threads, and partial results are merged in order: the same bits at every run.
"""

from __future__ import annotations

import math

import numpy as np

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.exponentials import exponentials, largest, soft_cap
from anaphora.runtime.kernels.products import score, weigh
from anaphora.runtime.kernels.vectors import address_of, load_element, num_lanes, store_element

CHUNK_TOKENS = 256


@kernel
def fill(line, begin, end, value):
    """line[begin:end] = value; line: address of float32."""
    for i in range(begin, end):
        store_element(line, i, np.float32(value), (0, 0, 0, 0))


@kernel
def soften(line, lead, first, end, slot, head, scale, cap, tops, sums):
    """Scores [first, end) become exponentials; notes the largest score and their sum. What is before them is lost.

    lead: a multiple of the lanes, at most `first`.
    """
    begin = line + 4 * lead
    if cap != 0:
        soft_cap(begin, end - lead, scale / cap, cap / scale)
    fill(line, lead, first, -np.inf)
    top = largest(begin, end - lead)
    tops[slot, head] = top
    sums[slot, head] = exponentials(begin, end - lead, top, scale)


@kernel
def attend_chunk(
    queries, keys, values, rows, tokens, first, visible, slots, first_head, last_head, num_heads, num_kv_heads, scale,
    cap, scores, tops, sums, partials, head_dim, element,
):  # fmt: skip
    """K/V heads [first_head, last_head) of one chunk for every new token that sees some of it.

    queries: address of operands (see products.spread) [tokens, num_heads, head_dim].
    keys, values: addresses of a layer's pool.
    rows: address of the chunk's row offsets (bytes, int64), readable up to a multiple of the lanes.
    tokens, first, visible, slots: int64 arrays, one entry for each such token: its number, the first of the chunk's
        keys that it sees and the one after the last, and where its partial result goes.
    cap: scores × scale are capped softly at it; 0: they are not.
    scores: float32 scratch [group * CHUNK_TOKENS].
    tops, sums: float32 [slots, num_heads]; partials: [slots, num_heads, head_dim].
    """
    dim = 16 * len(head_dim)
    group = num_heads // num_kv_heads
    lanes = num_lanes()
    at_once = max(1, min(4, 16 * 16 // dim // (32 // lanes)))  # heads whose values fit into registers together
    stride = 4 * CHUNK_TOKENS
    scores_at = address_of(scores)
    for kv_head in range(first_head, last_head):
        offset = kv_head * dim * len(element)
        for j in range(len(tokens)):
            skipped = first[j]
            count = visible[j] - skipped
            seen = rows + 8 * skipped
            lead = skipped // lanes * lanes  # whole vectors from here on stay within the line
            for g in range(group):
                head = kv_head * group + g
                query = queries + (tokens[j] * num_heads + head) * dim * 4
                line = scores_at + g * stride
                for t in range(lead, visible[j], lanes):
                    score(query, keys + offset, rows + 8 * t, line + 4 * t, head_dim, element)
                soften(line, lead, skipped, visible[j], slots[j], head, scale, cap, tops, sums)
            g = 0
            while g < group:
                out = address_of(partials) + 4 * (slots[j] * num_heads + kv_head * group + g) * dim
                line = scores_at + g * stride + 4 * skipped
                n = min(group - g, at_once)
                if n >= 4:
                    weigh(line, stride, values + offset, seen, count, out, 4 * dim, (0, 0, 0, 0), head_dim, element)
                    g += 4
                elif n == 3:
                    weigh(line, stride, values + offset, seen, count, out, 4 * dim, (0, 0, 0), head_dim, element)
                    g += 3
                elif n == 2:
                    weigh(line, stride, values + offset, seen, count, out, 4 * dim, (0, 0), head_dim, element)
                    g += 2
                else:
                    weigh(line, stride, values + offset, seen, count, out, 4 * dim, (0,), head_dim, element)
                    g += 1


@kernel
def merge(begin, end, head, scale, sinks, tops, sums, partials, out, dim, element):
    """One head of one token from its partial results [begin, end), as elements.

    sinks: address of a score (of elements, scaled) for each head, that takes probability and adds nothing. 0: none.
    """
    top = tops[begin, head]
    for c in range(begin + 1, end):
        top = max(top, tops[c, head])
    total = np.float32(0)
    if sinks != 0:
        sink = load_element(sinks, head, element) / scale
        top = max(top, sink)
        total = np.float32(math.exp((sink - top) * scale))
    first = partials[begin, head]
    for c in range(begin, end):
        factor = np.float32(math.exp((tops[c, head] - top) * scale))
        total += factor * sums[c, head]
        part = partials[c, head]
        for d in range(dim):
            before = first[d] if c > begin else np.float32(0)
            first[d] = before + factor * part[d]
    for d in range(dim):
        store_element(out, d, first[d] / total, element)
