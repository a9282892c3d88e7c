"""Which thread attends to which chunk, K/V head by K/V head, and by vectors or by the tile unit.

Knows chunks and what each costs; knows nothing of blocks and requests. Each (chunk, K/V head) is one thread's work, and
every thread's are in order; who computes it changes no bit of it.
"""

from __future__ import annotations

from anaphora.runtime.kernels.attention import CHUNK_TOKENS, attend_chunk
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.tile_attention import attend_head_by_tiles
from anaphora.runtime.kernels.tiles import has_tiles
from anaphora.runtime.kernels.vectors import address_of


@kernel
def heads_of(thread, num_threads, before, cost, total, num_kv_heads):
    """K/V heads [first, last) of a chunk that are this thread's.

    before, cost, total: of the chunks before it, of itself, of all of them.
    """
    first = last = 0
    for head in range(num_kv_heads):
        # The thread in whose part the middle of its work lies.
        middle = 2 * (before * num_kv_heads + cost * head) + cost
        owner = middle * num_threads // max(1, 2 * total * num_kv_heads)
        first += owner < thread
        last += owner <= thread
    return first, last


@kernel
def attend_chunks(
    thread, num_threads, first_item, last_item, work, items, rows, query_tokens, query_first, query_visible,
    query_slots, elements, operands, keys, values, num_heads, num_kv_heads, scale, cap, use_tiles, room, scores,
    tops, sums, partials, head_dim, element,
):  # fmt: skip
    """This thread's part of the chunks [first_item, last_item).

    work: int64 [chunks + 1], what the chunks before each one cost. elements, operands: addresses of queries, as
    attend_head_by_tiles and attend_chunk take them. room, scores: what these need. Others: see step.run_step.
    """
    total = work[last_item] - work[first_item]
    next_heads = heads_of(thread, num_threads, 0, work[first_item + 1] - work[first_item], total, num_kv_heads)
    for item in range(first_item, last_item):
        first_head, last_head = next_heads
        if item + 1 < last_item:
            before, cost = work[item + 1] - work[first_item], work[item + 2] - work[item + 1]
            next_heads = heads_of(thread, num_threads, before, cost, total, num_kv_heads)
        if first_head == last_head:
            continue
        begin, end = items[item, 0], items[item, 1]
        chunk_rows = address_of(rows) + 8 * item * CHUNK_TOKENS
        tokens, first, visible = query_tokens[begin:end], query_first[begin:end], query_visible[begin:end]
        slots = query_slots[begin:end]
        if use_tiles and has_tiles():
            for head in range(first_head, last_head):
                next_rows, next_head = chunk_rows, head
                if head + 1 < last_head:
                    next_head = head + 1
                elif item + 1 < last_item and next_heads[0] < next_heads[1]:
                    next_rows, next_head = chunk_rows + 8 * CHUNK_TOKENS, next_heads[0]
                attend_head_by_tiles(
                    elements, keys, values, chunk_rows, tokens, first, visible, slots, head, next_rows, next_head,
                    num_heads, num_kv_heads, scale, cap, room, tops, sums, partials, head_dim,
                )  # fmt: skip
        else:
            attend_chunk(
                operands, keys, values, chunk_rows, tokens, first, visible, slots, first_head, last_head, num_heads,
                num_kv_heads, scale, cap, scores, tops, sums, partials, head_dim, element,
            )  # fmt: skip
