"""The layers of a decoder of the Llama type over many tokens, in one call on every thread, by the tile unit.

Knows addresses and sizes; knows nothing of modules and plans. A step is shared out in one of two ways:

    by panels    a panel of 16 tokens belongs to one thread; weights are read by every thread, once for each
                 GROUP_PANELS of its own, whose operands stay in its cache meanwhile
    by outputs   every thread has all panels and a part of each weight, so that a weight is read once in all; for steps
                 so short that reading them takes the time

Attention is shared out by keys either way: see runtime.panel_step. Weights are read as they lie in memory. A token's
results depend neither on the way, nor on the other tokens of the step, nor on the number of threads.
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
NUM_TOKENS, HIDDEN, HEADS, KV_HEADS, MLP, HEAD_DIM, CHUNK_BYTES, BY_OUTPUTS = range(8)

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
    thread, num_threads, addresses, sizes, eps, scale, hidden, queries, cos, sin, slots, rows, sequences, items, units,
    starts, visible, barrier, own, own_size, configuration,
):  # fmt: skip
    """Run layers over panels.

    addresses: int64 [layers, 20]. eps: float32 [layers, 4], of input norm, query norm, key norm, MLP norm.
    hidden: address of panels of bfloat16 [panels, hidden]; of every panel, 16 tokens. queries: of as many operands
    [heads, head_dim]. cos, sin: of panels of float32 [panels, head_dim].
    slots: int64 [tokens]. rows: int64, where the keys of all sequences are, bytes from the layer's pool on.
    sequences: int64 [n, 2], the first of a sequence's rows, and how many there are. items: int64 [n, 3], see
    attend_panels. visible: int32 [n, 16]. units: int64 [m, 4], a sequence, a K/V head and items [first, last) of the
    sequence; starts: int64 [num_threads + 1], where each thread's units begin.
    """
    num_tokens, size, num_heads, num_kv_heads = sizes[NUM_TOKENS], sizes[HIDDEN], sizes[HEADS], sizes[KV_HEADS]
    mlp_size, dim = sizes[MLP], sizes[HEAD_DIM]
    num_panels = (num_tokens + 15) // 16
    # Which panels are this thread's, and which part of all outputs: all of the one, a share of the other.
    lead, step, part, parts = thread, num_threads, 0, 1
    if sizes[BY_OUTPUTS] != 0:
        lead, step, part, parts = 0, 1, thread, num_threads
    mine = (num_panels - lead + step - 1) // step
    saved = own + thread * own_size
    scratch = saved + CONFIGURATION_BYTES
    lines = scratch + 2 * max(dim, 32) * 64
    plain = lines + 16 * 2 * dim
    room = plain + GROUP_PANELS * 32 * size
    gated = room + sizes[CHUNK_BYTES] + lead * own_size - thread * own_size
    results = room + sizes[CHUNK_BYTES] + GROUP_PANELS * 32 * mlp_size
    attended = num_heads * dim
    num_units = num_heads + 2 * num_kv_heads
    if not has_tiles():
        return
    store_configuration(saved)
    load_configuration(configuration)
    for layer in range(len(addresses)):
        a = addresses[layer]
        for begin in range(0, mine, GROUP_PANELS):
            count = min(GROUP_PANELS, mine - begin)
            first_panel = lead + begin * step
            for i in range(count):
                panel = first_panel + i * step
                normalise_panel(hidden + panel * size * 32, a[INPUT_NORM], eps[layer, 0], size, plain + i * size * 32)
            for unit in range(part * num_units // parts, (part + 1) * num_units // parts):
                kind, head = QUERY, unit
                if unit >= num_heads + num_kv_heads:
                    kind, head = VALUE, unit - num_heads - num_kv_heads
                elif unit >= num_heads:
                    kind, head = KEY, unit - num_heads
                weight, bias = a[kind] + head * dim * 2 * size, a[kind + 1]
                for i in range(0, count, 2):
                    pair = min(2, count - i)
                    for r in range(0, dim, 32):
                        multiply(
                            weight + r * 2 * size, 16 * 2 * size, 2 * size, plain + i * size * 32, size * 32, size,
                            scratch + r * 64, dim * 64, pair,
                        )  # fmt: skip
                    for j in range(pair):
                        panel, line = first_panel + (i + j) * step, scratch + j * dim * 64
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
        for u in range(starts[thread], starts[thread + 1]):
            s, kv_head, first, last = units[u, 0], units[u, 1], units[u, 2], units[u, 3]
            attend_panels(
                queries, a[KEY_POOL], a[VALUE_POOL], rows + 8 * sequences[s, 0], sequences[s, 1], items[first:last],
                visible + 64 * first, kv_head, num_heads, num_kv_heads, scale, room, results, dim,
            )  # fmt: skip
        if not meet(barrier, num_threads):
            return
        for begin in range(0, mine, GROUP_PANELS):
            count = min(GROUP_PANELS, mine - begin)
            first_panel = lead + begin * step
            lines_of_hidden = hidden + first_panel * size * 32
            project(
                a[OUTPUT], a[OUTPUT_BIAS], size, part, parts, queries + first_panel * attended * 32,
                step * attended * 32, attended, lines_of_hidden, step * size * 32, count, scratch,
            )  # fmt: skip
            if parts > 1 and not meet(barrier, num_threads):
                return
            for i in range(count):
                place = lines_of_hidden + i * step * size * 32
                normalise_panel(place, a[MLP_NORM], eps[layer, 3], size, plain + i * size * 32)
            blocks = mlp_size // 16
            for n in range(16 * (part * blocks // parts), 16 * ((part + 1) * blocks // parts), 16):
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
            if parts > 1 and not meet(barrier, num_threads):
                return
            project(
                a[DOWN], a[DOWN_BIAS], size, part, parts, gated, mlp_size * 32, mlp_size, lines_of_hidden,
                step * size * 32, count, scratch,
            )  # fmt: skip
        if parts > 1 and not meet(barrier, num_threads):
            return
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
    weight, bias, size, part, parts, operand, operand_bytes, count, hidden, hidden_bytes, num_panels, scratch,
):  # fmt: skip
    """hidden += weight [size, count] × operand + bias, for this part of `size`; panels are hidden_bytes apart."""
    blocks = size // 32
    for n in range(32 * (part * blocks // parts), 32 * ((part + 1) * blocks // parts), 32):
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
