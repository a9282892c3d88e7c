"""A whole step of a decoder of the Llama type over few tokens, in one call on every thread.

Knows addresses and sizes; knows nothing of modules and plans. Every thread runs `run_step` with its number; they meet at
barriers, five a layer, and share out outputs, chunks and heads by number, so that who computes what does not change
what is computed. Sums are float32; what the module rounds to the weights' dtype between its parts is rounded here, too.

    x: operands (see vectors). hidden: elements. wide: float32 outputs of the linear parts, before they are rounded.
"""

from __future__ import annotations

import math

import numpy as np

from anaphora.runtime.kernels.attention import CHUNK_TOKENS, attend_chunk, merge
from anaphora.runtime.kernels.barrier import meet
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.linear import linear
from anaphora.runtime.kernels.vectors import (
    address_of,
    load_element,
    load_operand_number,
    store_element,
    store_operand,
)

# Columns of the table of addresses, one row a layer. 0: there is none.
INPUT_NORM, QUERY, QUERY_BIAS, KEY, KEY_BIAS, VALUE, VALUE_BIAS, OUTPUT, OUTPUT_BIAS = range(9)
QUERY_NORM, KEY_NORM, MLP_NORM, GATE, GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS = range(9, 18)
KEY_POOL, VALUE_POOL = 18, 19
NUM_COLUMNS = 20


@kernel
def normalise(source, weight, eps, size, out, element):  # type: ignore[no-untyped-def]
    """RMS norm of `size` elements into operands."""
    width = len(element)
    total = np.float32(0)
    for i in range(size):
        value = load_element(source + i * width, element)
        total += value * value
    factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + eps))
    for i in range(size):
        scaled = load_element(source + i * width, element) * factor
        store_operand(out, i, scaled * load_element(weight + i * width, element), element)


@kernel
def finish_head(wide, bias, norm, eps, cos, sin, head_dim, element):  # type: ignore[no-untyped-def]
    """One head of float32 in place: round, add a bias, normalise, turn; each part that has an address.

    wide: float32 array [head_dim]. cos, sin: float32 arrays [head_dim], or empty.
    """
    dim = 16 * len(head_dim)
    width = len(element)
    if bias != 0:
        for i in range(dim):
            wide[i] += load_element(bias + i * width, element)
    if norm != 0:
        total = np.float32(0)
        for i in range(dim):
            total += wide[i] * wide[i]
        factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(dim) + eps))
        for i in range(dim):
            wide[i] *= factor * load_element(norm + i * width, element)
    if len(cos) > 0:
        half = dim // 2
        for i in range(half):
            low, high = wide[i], wide[i + half]
            wide[i] = low * cos[i] + high * sin[i]
            wide[i + half] = high * cos[i + half] + low * sin[i + half]


@kernel
def add_rounded(hidden, stride, wide, bias, num_tokens, begin, end, element):  # type: ignore[no-untyped-def]
    """hidden[:, begin:end] += wide[:, begin:end] + bias; rounded before and after, as the module does."""
    width = len(element)
    for t in range(num_tokens):
        for n in range(begin, end):
            value = wide[t, n]
            if bias != 0:
                value += load_element(bias + n * width, element)
            place = hidden + t * stride + n * width
            store_element(place, load_element(place, element) + value, element)


@kernel
def run_step(  # type: ignore[no-untyped-def]
    thread, num_threads, barrier, addresses, sizes, eps, scale, cos, sin, slots, items, rows,
    query_tokens, query_visible, query_slots, token_slots, keep, final, hidden, x, queries, wide, scores, tops,
    sums, partials, normed, logits, head_dim, element,
):  # fmt: skip
    """Run the step's layers, the last norm and the head.

    addresses: int64 [layers, NUM_COLUMNS]. final: int64 [3], last norm, head, head's bias.
    sizes: int64, number of tokens, hidden size, heads, K/V heads, MLP size, vocabulary.
    eps: float32 [layers, 4], of input norm, query norm, key norm, MLP norm, and in the last row the last norm.
    cos, sin: float32 [tokens, head_dim], the sine's first half negated.
    slots: int64 [tokens], where a token's key and value go. keep: int64, tokens whose logits are wanted.
    items: int64 [chunks, 2], each chunk's part of the arrays query_*. rows: int64 [chunks, CHUNK_TOKENS].
    query_*: see attention.attend_chunk. token_slots: int64 [tokens + 1], each token's partial results.
    hidden, queries, normed, logits: addresses. x: address of num_threads + 1 buffers of operands [tokens, largest size];
    the last one is shared. wide: float32 [tokens, largest number of outputs]. scores: float32 [num_threads, ...].
    normed: elements [tokens, hidden size], the final hidden states; logits: elements [keep, vocabulary].
    """
    num_tokens, size, num_heads, num_kv_heads, mlp_size, vocab = (
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
    )  # fmt: skip
    dim, width = 16 * len(head_dim), len(element)
    x_stride = max(max(size, mlp_size), num_heads * dim) * 4
    own = x + thread * num_tokens * x_stride
    shared = x + num_threads * num_tokens * x_stride
    wide_at, wide_stride = address_of(wide), 4 * wide.shape[1]
    stride = size * width
    num_layers = addresses.shape[0]
    num_units = num_heads + 2 * num_kv_heads
    first_unit, last_unit = thread * num_units // num_threads, (thread + 1) * num_units // num_threads
    first, last = 16 * (thread * (size // 16) // num_threads), 16 * ((thread + 1) * (size // 16) // num_threads)
    first_mlp = 16 * (thread * (mlp_size // 16) // num_threads)
    last_mlp = 16 * ((thread + 1) * (mlp_size // 16) // num_threads)
    first_item, last_item = thread * len(items) // num_threads, (thread + 1) * len(items) // num_threads
    num_merges = num_tokens * num_heads
    nothing = cos[0, :0]
    for layer in range(num_layers):
        a = addresses[layer]
        for t in range(num_tokens):
            normalise(hidden + t * stride, a[INPUT_NORM], eps[layer, 0], size, own + t * x_stride, element)
        for unit in range(first_unit, last_unit):
            kind, head = QUERY, unit
            if unit >= num_heads + num_kv_heads:
                kind, head = VALUE, unit - num_heads - num_kv_heads
            elif unit >= num_heads:
                kind, head = KEY, unit - num_heads
            weight, bias = a[kind] + head * dim * size * width, a[kind + 1]
            if bias != 0:
                bias += head * dim * width
            linear(own, x_stride, num_tokens, weight, size, 0, dim, wide_at + 4 * unit * dim, wide_stride, element)
            for t in range(num_tokens):
                line = wide[t, unit * dim : (unit + 1) * dim]
                if kind == QUERY:
                    finish_head(line, bias, a[QUERY_NORM], eps[layer, 1], cos[t], sin[t], head_dim, element)
                    for i in range(dim):
                        store_operand(queries, (t * num_heads + head) * dim + i, line[i], element)
                else:
                    pool = a[VALUE_POOL]
                    if kind == KEY:
                        pool = a[KEY_POOL]
                        finish_head(line, bias, a[KEY_NORM], eps[layer, 2], cos[t], sin[t], head_dim, element)
                    else:
                        finish_head(line, bias, 0, eps[layer, 2], nothing, nothing, head_dim, element)
                    place = pool + (slots[t] * num_kv_heads + head) * dim * width
                    for i in range(dim):
                        store_element(place + i * width, line[i], element)
        if not meet(barrier, num_threads):
            return
        for item in range(first_item, last_item):
            begin, end = items[item, 0], items[item, 1]
            attend_chunk(
                queries, a[KEY_POOL], a[VALUE_POOL], address_of(rows) + 8 * item * CHUNK_TOKENS,
                query_tokens[begin:end], query_visible[begin:end], query_slots[begin:end], num_heads, num_kv_heads,
                scale, scores[thread], tops, sums, partials, head_dim, element,
            )  # fmt: skip
        if not meet(barrier, num_threads):
            return
        for n in range(thread * num_merges // num_threads, (thread + 1) * num_merges // num_threads):
            t, head = n // num_heads, n % num_heads
            merge(
                token_slots[t], token_slots[t + 1], head, scale, tops, sums, partials, shared + t * x_stride,
                head * dim, head_dim, element,
            )  # fmt: skip
        if not meet(barrier, num_threads):
            return
        linear(
            shared, x_stride, num_tokens, a[OUTPUT], num_heads * dim, first, last, wide_at, wide_stride, element
        )
        add_rounded(hidden, stride, wide, a[OUTPUT_BIAS], num_tokens, first, last, element)
        if not meet(barrier, num_threads):
            return
        for t in range(num_tokens):
            normalise(hidden + t * stride, a[MLP_NORM], eps[layer, 3], size, own + t * x_stride, element)
        linear(own, x_stride, num_tokens, a[GATE], size, first_mlp, last_mlp, wide_at, wide_stride, element)
        up_at = wide_at + 4 * mlp_size
        linear(own, x_stride, num_tokens, a[UP], size, first_mlp, last_mlp, up_at, wide_stride, element)
        for t in range(num_tokens):
            for n in range(first_mlp, last_mlp):
                gate, up = wide[t, n], wide[t, mlp_size + n]
                if a[GATE_BIAS] != 0:
                    gate += load_element(a[GATE_BIAS] + n * width, element)
                if a[UP_BIAS] != 0:
                    up += load_element(a[UP_BIAS] + n * width, element)
                activated = gate / (np.float32(1) + np.float32(math.exp(-gate)))
                store_operand(shared + t * x_stride, n, activated * up, element)
        if not meet(barrier, num_threads):
            return
        linear(shared, x_stride, num_tokens, a[DOWN], mlp_size, first, last, wide_at, wide_stride, element)
        add_rounded(hidden, stride, wide, a[DOWN_BIAS], num_tokens, first, last, element)
        if not meet(barrier, num_threads):
            return
    for t in range(num_tokens):
        normalise(hidden + t * stride, final[0], eps[num_layers, 0], size, own + t * x_stride, element)
        if thread == 0:
            for i in range(size):
                value = load_operand_number(own + t * x_stride, i, element)
                store_element(normed + t * stride + i * width, value, element)
    first_word = 16 * (thread * (vocab // 16) // num_threads)
    last_word = 16 * ((thread + 1) * (vocab // 16) // num_threads)
    if thread == num_threads - 1:
        last_word = vocab
    for j in range(len(keep)):
        linear(
            own + keep[j] * x_stride, x_stride, 1, final[1], size, first_word, last_word,
            wide_at + j * wide_stride, wide_stride, element,
        )  # fmt: skip
        for n in range(first_word, last_word):
            value = wide[j, n]
            if final[2] != 0:
                value += load_element(final[2] + n * width, element)
            store_element(logits + (j * vocab + n) * width, value, element)
    meet(barrier, num_threads)
