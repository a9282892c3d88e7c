"""The layers of a decoder of the Llama type over many tokens, in one call on every thread, by the tile unit.

Knows addresses and sizes; knows nothing of modules and plans. A panel of 16 tokens belongs to one thread from the
embedding to the last layer, so threads meet once a layer: when its keys and values are in the pool. Weights are read as
they lie in memory, once for each GROUP_PANELS of a thread, whose operands stay in its own cache meanwhile. A token's
results depend neither on the other tokens of the step nor on the number of threads.
"""

from __future__ import annotations

from anaphora.runtime.kernels.barrier import meet
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.panel_attention import attend_panels, chunk_bytes, copy_row
from anaphora.runtime.kernels.panels import (
    add_panel_bias,
    add_to_panel,
    gate_panel,
    multiply_panels,
    normalise_panel,
    scale_panel,
    shorten_panel,
    turn_panel,
    turn_to_rows,
)
from anaphora.runtime.kernels.tiles import has_tiles, load_configuration, store_configuration

# Columns of the table of addresses, one row a layer. 0: there is none.
INPUT_NORM, QUERY, QUERY_BIAS, KEY, KEY_BIAS, VALUE, VALUE_BIAS, OUTPUT, OUTPUT_BIAS = range(9)
QUERY_NORM, KEY_NORM, MLP_NORM, GATE, GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS = range(9, 18)
KEY_POOL, VALUE_POOL = 18, 19

# Places in the array of sizes.
NUM_TOKENS, HIDDEN, HEADS, KV_HEADS, MLP, HEAD_DIM, CHUNK_BYTES = range(7)

GROUP_PANELS = 16

# Parts of a thread's own memory.
CONFIGURATION_BYTES = 64


def own_bytes(hidden_size: int, mlp_size: int, head_dim: int, result_bytes: int) -> int:
    """What a thread needs for itself. result_bytes: for the results of all of its items."""
    scratch = 2 * max(head_dim, 32) * 64 + 16 * 2 * head_dim
    group = GROUP_PANELS * 32 * (hidden_size + mlp_size)
    return CONFIGURATION_BYTES + scratch + group + chunk_bytes(head_dim) + result_bytes


@kernel
def run_layers(
    thread, num_threads, addresses, sizes, eps, scale, hidden, queries, cos, sin, slots, rows, sequences, items, starts,
    visible, barrier, own, own_size, configuration,
):  # fmt: skip
    """Run layers over panels.

    addresses: int64 [layers, 20]. eps: float32 [layers, 4], of input norm, query norm, key norm, MLP norm.
    hidden: address of panels of bfloat16 [panels, hidden]; of every panel, 16 tokens. queries: of as many operands
    [heads, head_dim]. cos, sin: of panels of float32 [panels, head_dim].
    slots: int64 [tokens]. rows: int64, where the keys of all sequences are, bytes from the layer's pool on.
    sequences: int64 [n, 2], the first of a sequence's rows, and how many there are. items: int64 [n, 3], see
    attend_panels, sorted by thread and sequence; starts: int64 [num_threads, sequences + 1], where they begin.
    visible: int32 [n, 16].
    """
    num_tokens, size, num_heads, num_kv_heads = sizes[NUM_TOKENS], sizes[HIDDEN], sizes[HEADS], sizes[KV_HEADS]
    mlp_size, dim = sizes[MLP], sizes[HEAD_DIM]
    num_panels = (num_tokens + 15) // 16
    mine = (num_panels - thread + num_threads - 1) // num_threads
    saved = own + thread * own_size
    scratch = saved + CONFIGURATION_BYTES
    lines = scratch + 2 * max(dim, 32) * 64
    plain = lines + 16 * 2 * dim
    gated = plain + GROUP_PANELS * 32 * size
    room = gated + GROUP_PANELS * 32 * mlp_size
    results = room + sizes[CHUNK_BYTES]
    attended = num_heads * dim
    if not has_tiles():
        return
    store_configuration(saved)
    load_configuration(configuration)
    for layer in range(len(addresses)):
        a = addresses[layer]
        for begin in range(0, mine, GROUP_PANELS):
            count = min(GROUP_PANELS, mine - begin)
            for i in range(count):
                panel = thread + (begin + i) * num_threads
                normalise_panel(hidden + panel * size * 32, a[INPUT_NORM], eps[layer, 0], size, plain + i * size * 32)
            for unit in range(num_heads + 2 * num_kv_heads):
                kind, head = QUERY, unit
                if unit >= num_heads + num_kv_heads:
                    kind, head = VALUE, unit - num_heads - num_kv_heads
                elif unit >= num_heads:
                    kind, head = KEY, unit - num_heads
                weight, bias = a[kind] + head * dim * 2 * size, a[kind + 1]
                for i in range(0, count, 2):
                    pair = min(2, count - i)
                    for r in range(0, dim, 32):
                        multiply(weight + r * 2 * size, 16 * 2 * size, 2 * size, plain + i * size * 32, size * 32, size,
                                 scratch + r * 64, dim * 64, pair)  # fmt: skip
                    for j in range(pair):
                        panel, line = thread + (begin + i + j) * num_threads, scratch + j * dim * 64
                        if bias != 0:
                            add_panel_bias(line, bias + head * dim * 2, dim)
                        if kind == QUERY and a[QUERY_NORM] != 0:
                            scale_panel(line, a[QUERY_NORM], eps[layer, 1], dim)
                        elif kind == KEY and a[KEY_NORM] != 0:
                            scale_panel(line, a[KEY_NORM], eps[layer, 2], dim)
                        if kind != VALUE:
                            turn_panel(line, cos + panel * dim * 64, sin + panel * dim * 64, dim)
                        if kind == QUERY:
                            shorten_panel(line, dim, queries + (panel * num_heads + head) * dim * 32)
                            continue
                        turn_to_rows(line, dim, lines, 2 * dim)
                        pool = a[KEY_POOL] if kind == KEY else a[VALUE_POOL]
                        for t in range(min(16, num_tokens - 16 * panel)):
                            place = pool + (slots[16 * panel + t] * num_kv_heads + head) * dim * 2
                            copy_row(lines + t * 2 * dim, place, dim)
        if not meet(barrier, num_threads):
            return
        for s in range(len(sequences)):
            first, last = starts[thread, s], starts[thread, s + 1]
            if first < last:
                attend_panels(
                    queries, a[KEY_POOL], a[VALUE_POOL], rows + 8 * sequences[s, 0], sequences[s, 1], items[first:last],
                    visible + 64 * first, num_heads, num_kv_heads, scale, room, results, dim,
                )  # fmt: skip
        for begin in range(0, mine, GROUP_PANELS):
            count = min(GROUP_PANELS, mine - begin)
            first_panel = thread + begin * num_threads
            project(
                a[OUTPUT], a[OUTPUT_BIAS], size, queries + first_panel * attended * 32, num_threads * attended * 32,
                attended, hidden + first_panel * size * 32, num_threads * size * 32, count, scratch,
            )  # fmt: skip
            for i in range(count):
                panel = first_panel + i * num_threads
                normalise_panel(hidden + panel * size * 32, a[MLP_NORM], eps[layer, 3], size, plain + i * size * 32)
            for n in range(0, mlp_size, 16):
                gate, up = a[GATE] + n * 2 * size, a[UP] + n * 2 * size
                for i in range(0, count, 2):
                    pair = min(2, count - i)
                    multiply(gate, up - gate, 2 * size, plain + i * size * 32, size * 32, size, scratch, 32 * 64, pair)
                    for j in range(pair):
                        panel = scratch + j * 32 * 64
                        if a[GATE_BIAS] != 0:
                            add_panel_bias(panel, a[GATE_BIAS] + 2 * n, 16)
                        if a[UP_BIAS] != 0:
                            add_panel_bias(panel + 16 * 64, a[UP_BIAS] + 2 * n, 16)
                        gate_panel(panel, gated + (i + j) * mlp_size * 32 + n * 32)
            project(
                a[DOWN], a[DOWN_BIAS], size, gated, mlp_size * 32, mlp_size, hidden + first_panel * size * 32,
                num_threads * size * 32, count, scratch,
            )  # fmt: skip
    load_configuration(saved)
    meet(barrier, num_threads)


@kernel
def multiply(first, across, stride, operand, operand_bytes, count, out, out_bytes, num_panels):
    """See multiply_panels; `across`: bytes from `first` to `second`."""
    if num_panels == 2:
        multiply_panels(first, first + across, stride, operand, operand_bytes, count, out, out_bytes, (0, 0))
    else:
        multiply_panels(first, first + across, stride, operand, operand_bytes, count, out, out_bytes, (0,))


@kernel
def project(
    weight, bias, size, operand, operand_bytes, count, hidden, hidden_bytes, num_panels, scratch,
):  # fmt: skip
    """hidden += weight [size, count] × operand + bias, for panels that are hidden_bytes apart."""
    for n in range(0, size, 32):
        for i in range(0, num_panels, 2):
            pair = min(2, num_panels - i)
            multiply(
                weight + n * 2 * count, 16 * 2 * count, 2 * count, operand + i * operand_bytes, operand_bytes, count,
                scratch, 32 * 64, pair,
            )  # fmt: skip
            for j in range(pair):
                panel = scratch + j * 32 * 64
                if bias != 0:
                    add_panel_bias(panel, bias + 2 * n, 32)
                add_to_panel(hidden + (i + j) * hidden_bytes + n * 32, panel, 32)
