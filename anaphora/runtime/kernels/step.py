"""A whole step of a decoder over few tokens, in one call on every thread.

Knows addresses and sizes; knows nothing of modules and plans. Every thread runs `run_step` with its number; they meet
at barriers, six a layer (eight where what attention and MLP give is normalised), and share out outputs, chunks and
heads by number, so that who computes what does not change what is computed. Sums are float32; hidden states, keys,
values and what goes into a linear part are elements, rounded as the module rounds them.

Buffers hold rows for a multiple of 16 tokens. `own` belongs to one thread: every thread normalises all tokens for
itself, which costs less than to wait for others.
"""

from __future__ import annotations

import numpy as np

from anaphora.runtime.kernels.attention import merge
from anaphora.runtime.kernels.barrier import meet
from anaphora.runtime.kernels.code_layout import PANEL_OUTPUTS, panel_bytes, row_bytes, scale_bytes
from anaphora.runtime.kernels.codes import prepare_rows, product
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.exponentials import gate, soft_cap
from anaphora.runtime.kernels.low_rank import DOWN_PART, GATE_PART, UP_PART, K, O, Q, V, add_low_rank, narrow_rows
from anaphora.runtime.kernels.parts import (
    add_bias,
    add_normalised,
    add_to_hidden,
    copy_elements,
    finish_head,
    normalise,
    store_line,
)
from anaphora.runtime.kernels.products import spread
from anaphora.runtime.kernels.sharing import attend_chunks
from anaphora.runtime.kernels.tile_attention import tile_bytes
from anaphora.runtime.kernels.tiles import has_tiles, load_configuration, store_configuration
from anaphora.runtime.kernels.vectors import address_of, fetch_lines

# Columns of the table of addresses, one row a layer. 0: there is none.
INPUT_NORM, QUERY, QUERY_BIAS, KEY, KEY_BIAS, VALUE, VALUE_BIAS, OUTPUT, OUTPUT_BIAS = range(9)
QUERY_NORM, KEY_NORM, MLP_NORM, GATE, GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS = range(9, 18)
KEY_POOL, VALUE_POOL, ATTENTION_NORM, MLP_OUT_NORM, SINKS = range(18, 23)
GROUP, ROTARY = 23, 24  # numbers, not addresses
NUM_COLUMNS = 25

# Columns of the table of numbers, one row a layer. The last norm and the soft cap of logits stand in one more row.
N_INPUT, N_QUERY, N_KEY, N_ATTENTION, N_MLP, N_MLP_OUT = range(0, 12, 2)  # of each norm its eps, then its offset
N_SCALE, N_SOFT_CAP, N_GATE_LINEAR, N_GATE_CUBIC = range(12, 16)
NUM_NUMBERS = 16

# Places in the array of sizes.
NUM_TOKENS, HIDDEN, HEADS, KV_HEADS, MLP, VOCABULARY, USE_TILES = range(7)

# Places in the array of buffers' addresses.
B_HIDDEN, B_SHARED, B_QUERIES, B_NORMED, B_LOGITS, B_BARRIER = range(6)

# Parts of a thread's own buffer: these, and then what `own_bytes` adds.
SCRATCH_BYTES = 1024
CONFIGURATION_BYTES = 64


def own_bytes(
    num_rows: int, hidden_size: int, largest_size: int, head_dim: int, element_bytes: int, *, has_codes: bool
) -> int:
    """Bytes that a thread needs for itself; sizes are of rows. A multiple of 64.

    Attention takes the room of the operands, which are not needed at the same time.
    """
    operands = max(num_rows * 4 * largest_size, tile_bytes(head_dim))
    rows = num_rows * 2 * hidden_size * element_bytes + operands + has_codes * panel_bytes(largest_size)
    return SCRATCH_BYTES + CONFIGURATION_BYTES + -(-rows // 64) * 64


@kernel
def has_tile_unit():
    return has_tiles()


@kernel
def add_output(
    num_threads, num_tokens, hidden, stride, wide, bias, norm, eps, offset, size, first, last, barrier, element
):  # fmt: skip
    """hidden[first:last] += what a linear part gave, normalised if `norm` is an address; then the threads meet.

    A norm takes in what all threads gave, so they meet before it, too. False: see barrier.meet.
    """
    for t in range(num_tokens):
        if norm == 0:
            add_to_hidden(hidden + t * stride, wide[t], bias, first, last, element)
        else:
            add_bias(wide[t], bias, first, last, element)
    if norm != 0:
        if not meet(barrier, num_threads):
            return False
        for t in range(num_tokens):
            add_normalised(hidden + t * stride, wide[t, :size], norm, eps, offset, first, last, element)
    return meet(barrier, num_threads)


@kernel
def run_step(
    thread, num_threads, addresses, scales, sizes, numbers, cos, sin, slots, group_items, work, items, rows,
    query_tokens, query_first, query_visible, query_slots, token_slots, keep, final, buffers, own, own_size,
    configuration, wide, words, scores, tops, sums, partials, low_rank, adapters, narrow, head_dim, element,
    codes, head_codes,
):  # fmt: skip
    """Run the step's layers, the last norm and the head.

    addresses: int64 [layers, NUM_COLUMNS]. final: int64 [3], last norm, head, head's bias.
    scales: int64 [layers + 1, DOWN + 1], of weights of codes in the weights' columns; of the head in the last row.
    numbers: float32 [layers + 1, NUM_NUMBERS].
    cos, sin: float32 [rotary embeddings, tokens, head_dim], the sine's first half negated.
    slots: int64 [groups, tokens], where a token's key and value go. keep: int64, tokens whose logits are wanted.
    group_items: int64 [groups + 1], where each group's chunks begin. work: see sharing.attend_chunks.
    items: int64 [chunks, 2], each chunk's part of the arrays query_*. rows: int64 [chunks, CHUNK_TOKENS].
    query_*: see attention.attend_chunk. token_slots: int64 [groups, tokens + 1], each token's partial results.
    buffers: int64 addresses. own, own_size: address and bytes of each thread's own memory: scratch, rows of
    elements, operands, a panel for codes. configuration: address of the tiles' one, or 0: attention has no tiles.
    wide: float32 [tokens, most outputs of a layer's linear part]. words: float32 [keep, vocabulary].
    scores: float32 [num_threads, ...]. low_rank: int64 [layers, parts, adapters, 3], see kernels.low_rank. adapters:
    int64 [tokens], or empty if none has one. narrow: float32 [num_threads, 3, tokens, largest rank].
    codes, head_codes: what the layers' weights and the head's are: see code_layout.
    """
    num_tokens, size, num_heads, num_kv_heads = sizes[NUM_TOKENS], sizes[HIDDEN], sizes[HEADS], sizes[KV_HEADS]
    mlp_size, vocabulary, use_tiles = sizes[MLP], sizes[VOCABULARY], sizes[USE_TILES] != 0
    hidden, shared, queries, barrier = buffers[B_HIDDEN], buffers[B_SHARED], buffers[B_QUERIES], buffers[B_BARRIER]
    dim, width = 16 * len(head_dim), len(element)
    padded = (max(num_tokens, len(keep)) + 15) // 16 * 16
    scratch = own + thread * own_size
    saved = scratch + SCRATCH_BYTES
    plain = saved + CONFIGURATION_BYTES
    kept = plain + padded * size * width
    operands = kept + padded * size * width
    panel = own + (thread + 1) * own_size - 2 * PANEL_OUTPUTS * max(size, mlp_size, num_heads * dim)
    input_bytes = row_bytes(size, codes, element)  # of one output's weight
    attended_bytes, mlp_bytes = row_bytes(num_heads * dim, codes, element), row_bytes(mlp_size, codes, element)
    wide_at, wide_stride = address_of(wide), 4 * wide.shape[1]
    stride, attended_stride = size * width, num_heads * dim * width
    mlp_stride = (mlp_size + 15) // 16 * 16 * width  # what is behind a row is written with it
    num_layers = addresses.shape[0]
    num_units = num_heads + 2 * num_kv_heads
    first_unit, last_unit = thread * num_units // num_threads, (thread + 1) * num_units // num_threads
    first, last = 16 * (thread * (size // 16) // num_threads), 16 * ((thread + 1) * (size // 16) // num_threads)
    first_mlp = 16 * (thread * (mlp_size // 16) // num_threads)
    last_mlp = 16 * ((thread + 1) * (mlp_size // 16) // num_threads)
    if thread == num_threads - 1:
        last, last_mlp = size, mlp_size
    num_merges = num_tokens * num_heads
    nothing = cos[0, 0, :0]
    if configuration != 0:
        store_configuration(saved)
        load_configuration(configuration)
    for layer in range(num_layers):
        a, s, f = addresses[layer], scales[layer], numbers[layer]
        group, turns, scale = a[GROUP], a[ROTARY], f[N_SCALE]
        for t in range(num_tokens):
            place = plain + t * stride
            normalise(hidden + t * stride, a[INPUT_NORM], f[N_INPUT], f[N_INPUT + 1], size, place, element)
        prepare_rows(plain, stride, num_tokens, size, operands, use_tiles, element, codes)
        for part in (Q, K, V):
            narrow_rows(plain, stride, size, low_rank[layer, part], adapters, narrow[thread, part], element)
        for unit in range(first_unit, last_unit):
            kind, head, part, outputs = QUERY, unit, Q, num_heads * dim
            if unit >= num_heads + num_kv_heads:
                kind, head, part, outputs = VALUE, unit - num_heads - num_kv_heads, V, num_kv_heads * dim
            elif unit >= num_heads:
                kind, head, part, outputs = KEY, unit - num_heads, K, num_kv_heads * dim
            weight, bias = a[kind] + head * dim * input_bytes, a[kind + 1]
            if bias != 0:
                bias += head * dim * width
            product(
                operands, num_tokens, weight, s[kind] + head * dim * scale_bytes(size, codes), size, 0, dim,
                wide_at + 4 * unit * dim, wide_stride, scratch, panel, use_tiles, element, codes,
            )  # fmt: skip
            add_low_rank(
                narrow[thread, part], low_rank[layer, part], adapters, outputs, head * dim, (head + 1) * dim, wide,
                (unit - head) * dim,
            )  # fmt: skip
            for t in range(num_tokens):
                line = wide[t, unit * dim : (unit + 1) * dim]
                if kind == QUERY:
                    finish_head(
                        line,
                        bias,
                        a[QUERY_NORM],
                        f[N_QUERY],
                        f[N_QUERY + 1],
                        cos[turns, t],
                        sin[turns, t],
                        dim,
                        element,
                    )
                    place = shared + t * attended_stride + head * dim * width
                    store_line(line, place, element)
                    spread(place, queries + (t * num_heads + head) * dim * 4, dim, element)
                    continue
                place = (slots[group, t] * num_kv_heads + head) * dim * width
                if kind == KEY:
                    finish_head(
                        line, bias, a[KEY_NORM], f[N_KEY], f[N_KEY + 1], cos[turns, t], sin[turns, t], dim, element
                    )
                    store_line(line, a[KEY_POOL] + place, element)
                else:
                    finish_head(line, bias, 0, f[N_KEY], f[N_KEY + 1], nothing, nothing, dim, element)
                    store_line(line, a[VALUE_POOL] + place, element)
        # What the next linear part reads first comes while the threads wait for each other, here and below.
        fetch_lines(a[OUTPUT] + first * attended_bytes, 32 * attended_bytes)
        if not meet(barrier, num_threads):
            return
        attend_chunks(
            thread, num_threads, group_items[group], group_items[group + 1], work, items, rows, query_tokens,
            query_first, query_visible, query_slots, shared, queries, a[KEY_POOL], a[VALUE_POOL], num_heads,
            num_kv_heads, scale, f[N_SOFT_CAP], configuration != 0, operands, scores[thread], tops, sums,
            partials, head_dim, element,
        )  # fmt: skip
        if not meet(barrier, num_threads):
            return
        for n in range(thread * num_merges // num_threads, (thread + 1) * num_merges // num_threads):
            t, head = n // num_heads, n % num_heads
            place = shared + t * attended_stride + head * dim * width
            begin, end = token_slots[group, t], token_slots[group, t + 1]
            merge(begin, end, head, scale, a[SINKS], tops, sums, partials, place, dim, element)
        if not meet(barrier, num_threads):
            return
        prepare_rows(shared, attended_stride, num_tokens, num_heads * dim, operands, use_tiles, element, codes)
        product(
            operands, num_tokens, a[OUTPUT], s[OUTPUT], num_heads * dim, first, last, wide_at, wide_stride, scratch,
            panel, use_tiles, element, codes,
        )  # fmt: skip
        narrow_rows(shared, attended_stride, num_heads * dim, low_rank[layer, O], adapters, narrow[thread, 0], element)
        add_low_rank(narrow[thread, 0], low_rank[layer, O], adapters, size, first, last, wide, 0)
        fetch_lines(a[GATE] + first_mlp * input_bytes, 32 * input_bytes)
        if not add_output(
            num_threads, num_tokens, hidden, stride, wide, a[OUTPUT_BIAS], a[ATTENTION_NORM], f[N_ATTENTION],
            f[N_ATTENTION + 1], size, first, last, barrier, element,
        ):  # fmt: skip
            return
        for t in range(num_tokens):
            place = plain + t * stride
            normalise(hidden + t * stride, a[MLP_NORM], f[N_MLP], f[N_MLP + 1], size, place, element)
        prepare_rows(plain, stride, num_tokens, size, operands, use_tiles, element, codes)
        for column, part, offset in ((GATE, GATE_PART, 0), (UP, UP_PART, mlp_size)):
            product(
                operands, num_tokens, a[column], s[column], size, first_mlp, last_mlp, wide_at + 4 * offset,
                wide_stride, scratch, panel, use_tiles, element, codes,
            )  # fmt: skip
            narrow_rows(plain, stride, size, low_rank[layer, part], adapters, narrow[thread, 0], element)
            add_low_rank(
                narrow[thread, 0], low_rank[layer, part], adapters, mlp_size, first_mlp, last_mlp, wide, offset
            )
            for t in range(num_tokens):
                add_bias(wide[t, offset : offset + mlp_size], a[column + 1], first_mlp, last_mlp, element)
        for t in range(num_tokens):
            line = wide_at + t * wide_stride + 4 * first_mlp
            place = shared + t * mlp_stride + first_mlp * width
            gate(line, line + 4 * mlp_size, place, last_mlp - first_mlp, f[N_GATE_LINEAR], f[N_GATE_CUBIC], element)
        fetch_lines(a[DOWN] + first * mlp_bytes, 32 * mlp_bytes)
        if not meet(barrier, num_threads):
            return
        prepare_rows(shared, mlp_stride, num_tokens, mlp_size, operands, use_tiles, element, codes)
        product(
            operands, num_tokens, a[DOWN], s[DOWN], mlp_size, first, last, wide_at, wide_stride, scratch, panel,
            use_tiles, element, codes,
        )  # fmt: skip
        narrow_rows(shared, mlp_stride, mlp_size, low_rank[layer, DOWN_PART], adapters, narrow[thread, 0], element)
        add_low_rank(narrow[thread, 0], low_rank[layer, DOWN_PART], adapters, size, first, last, wide, 0)
        if layer + 1 < num_layers:
            fetch_lines(addresses[layer + 1, QUERY] + first_unit * dim * input_bytes, 32 * input_bytes)
        if not add_output(
            num_threads, num_tokens, hidden, stride, wide, a[DOWN_BIAS], a[MLP_OUT_NORM], f[N_MLP_OUT],
            f[N_MLP_OUT + 1], size, first, last, barrier, element,
        ):  # fmt: skip
            return
    f = numbers[num_layers]
    for t in range(num_tokens):
        place = plain + t * stride
        normalise(hidden + t * stride, final[0], f[N_INPUT], f[N_INPUT + 1], size, place, element)
        if thread == 0:
            copy_elements(place, buffers[B_NORMED] + t * stride, size, element)
    if len(keep) > 0:
        for j in range(len(keep)):
            copy_elements(plain + keep[j] * stride, kept + j * stride, size, element)
        prepare_rows(kept, stride, len(keep), size, operands, use_tiles, element, head_codes)
        first_word = 16 * (thread * (vocabulary // 16) // num_threads)
        last_word = 16 * ((thread + 1) * (vocabulary // 16) // num_threads)
        if thread == num_threads - 1:
            last_word = vocabulary
        product(
            operands, len(keep), final[1], scales[num_layers, 0], size, first_word, last_word, address_of(words),
            4 * words.shape[1], scratch, panel, use_tiles, element, head_codes,
        )  # fmt: skip
        for j in range(len(keep)):
            add_bias(words[j], final[2], first_word, last_word, element)
            cap = f[N_SOFT_CAP]
            if cap != 0:
                line = address_of(words[j]) + 4 * first_word
                soft_cap(line, last_word - first_word, np.float32(1) / cap, cap)
            place = buffers[B_LOGITS] + (j * vocabulary + first_word) * width
            store_line(words[j, first_word:last_word], place, element)
    if configuration != 0:
        load_configuration(saved)
    meet(barrier, num_threads)
