"""The layers of a decoder over many tokens, in one call on every thread, by the tile unit.

Knows addresses and sizes; knows nothing of modules and plans. Between two meetings of the threads there is a list of
things to do, a block of outputs of GROUP_PANELS panels each, of which every thread takes the next as soon as it is
free: one may be twice as fast as another, as virtual cores share what is real. Weights are read as they lie in memory,
once for each group of panels. A token's results depend neither on who computes them, nor on the other tokens of the
step, nor on the number of threads.
"""

from __future__ import annotations

from anaphora.runtime.kernels.barrier import begin_turn, claim, meet
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.low_rank import DOWN_PART, GATE_PART, UP_PART, K, O, Q, V
from anaphora.runtime.kernels.panel_adapters import (
    ATTENTION_INPUT,
    DOWN_INPUT,
    MLP_INPUT,
    OUTPUT_INPUT,
    add_adapters,
    narrow_panel,
    narrow_panels,
)
from anaphora.runtime.kernels.panel_attention import attend_panels, copy_row, merge_spans, result_bytes
from anaphora.runtime.kernels.panel_products import GROUP_PANELS, add_normalised, multiply, project
from anaphora.runtime.kernels.panels import (
    add_panel_bias,
    gate_panel,
    normalise_panel,
    scale_panel,
    shorten_panel,
    turn_panel,
    turn_to_rows,
)
from anaphora.runtime.kernels.step import (
    ATTENTION_NORM,
    DOWN,
    DOWN_BIAS,
    GATE,
    GATE_BIAS,
    GROUP,
    INPUT_NORM,
    KEY,
    KEY_NORM,
    KEY_POOL,
    MLP_NORM,
    MLP_OUT_NORM,
    N_ATTENTION,
    N_GATE_CUBIC,
    N_GATE_LINEAR,
    N_INPUT,
    N_KEY,
    N_MLP,
    N_MLP_OUT,
    N_QUERY,
    N_SCALE,
    N_SOFT_CAP,
    OUTPUT,
    OUTPUT_BIAS,
    QUERY,
    QUERY_NORM,
    ROTARY,
    SINKS,
    UP,
    UP_BIAS,
    VALUE,
    VALUE_POOL,
)
from anaphora.runtime.kernels.tiles import has_tiles, load_configuration, store_configuration
from anaphora.runtime.kernels.unpacking import row_stride, rows_of

# Places in the array of sizes.
NUM_TOKENS, HIDDEN, HEADS, KV_HEADS, MLP, HEAD_DIM, CHUNK_BYTES, OWN_BYTES, ROOM_BYTES = range(9)

CONFIGURATION_BYTES = 64
"""Of a thread's own memory: the tile unit's configuration before the step."""


def own_bytes(hidden_size: int, head_dim: int, attention_bytes: int, code_bytes: int) -> int:
    """What a thread needs for itself.

    attention_bytes: for a chunk, and the results of all items of a unit. code_bytes: for weights that are unpacked.
    """
    scratch = 2 * max(head_dim, 32) * 64 + 16 * 2 * max(head_dim, 32)
    return CONFIGURATION_BYTES + scratch + code_bytes + max(GROUP_PANELS * 32 * hidden_size, attention_bytes)


@kernel
def run_layers(
    thread, num_threads, addresses, scales, sizes, numbers, hidden, queries, gated, wide, cos, sin, slots, rows,
    sequences, items, units, merges, parts, visible, partials, downs, ups, low_rank, barrier, claims, own,
    configuration, codes,
):  # fmt: skip
    """Run layers over panels.

    addresses, scales, numbers: tables of the layers, see step.run_step. codes: what their weights are, see code_layout.
    hidden: address of panels of bfloat16 [panels, hidden]; of every panel, 16 tokens. queries: of as many operands
    [heads, head_dim]. gated: of GROUP_PANELS operands [MLP]. wide: of GROUP_PANELS panels of float32 [hidden], for what
    is normalised before it is added. cos, sin: of panels of float32 [rotary embeddings, panels, head_dim].
    slots: int64 [groups, tokens]. rows: int64, where the keys of all sequences are, bytes from the layer's pool on.
    sequences: int64 [groups, n], the row of a sequence's key 0, were it there. items: int64 [n, 5], see attend_panels;
    a sequence's in the order of what they see. visible: int32 [n, 2, 16], of each item. units: int64 [m, 7], a
    sequence, a K/V head, items [first, last) and keys [first, last) of the sequence, and where among `partials` the
    results of these keys go, -1 if they are all. merges: int64 [k, 5], a panel, a head, the first of its results, how
    many are from one to the next, how many there are. parts: int64 [groups, 4], a group's units [first, last) and
    merges [first, last). downs, ups: int64 [layers, ...], and low_rank: see panel_adapters. claims: see barrier.claim;
    zeros.
    """
    num_tokens, size, num_heads, num_kv_heads = sizes[NUM_TOKENS], sizes[HIDDEN], sizes[HEADS], sizes[KV_HEADS]
    mlp_size, dim = sizes[MLP], sizes[HEAD_DIM]
    num_panels = (num_tokens + 15) // 16
    num_stretches = (num_panels + GROUP_PANELS - 1) // GROUP_PANELS
    saved = own + thread * sizes[OWN_BYTES]
    scratch = saved + CONFIGURATION_BYTES
    lines = scratch + 2 * max(dim, 32) * 64
    room = lines + 16 * 2 * max(dim, 32)
    plain = room + sizes[ROOM_BYTES]
    input_stride = row_stride(size, codes)
    attended, num_units, has_adapters = num_heads * dim, num_heads + 2 * num_kv_heads, downs.shape[2] > 0
    if not has_tiles():
        return
    store_configuration(saved)
    load_configuration(configuration)
    turn = 0
    for layer in range(len(addresses)):
        a, s, f = addresses[layer], scales[layer], numbers[layer]
        group, scale, turned = a[GROUP], f[N_SCALE], a[ROTARY] * num_panels * dim * 64
        if has_adapters:
            begin_turn(claims, turn)
            todo = claim(claims, turn)
            while todo < num_panels:
                place = hidden + todo * size * 32
                normalise_panel(place, a[INPUT_NORM], f[N_INPUT], f[N_INPUT + 1], size, plain)
                narrow_panel(downs[layer, ATTENTION_INPUT], low_rank, todo, plain, size, scratch)
                todo = claim(claims, turn)
            turn += 1
            if not meet(barrier, num_threads):
                return
        begin_turn(claims, turn)
        todo, normed = claim(claims, turn), -1
        while todo < num_stretches * num_units:
            stretch, unit = todo // num_units, todo % num_units
            first_panel = stretch * GROUP_PANELS
            count = min(GROUP_PANELS, num_panels - first_panel)
            if normed != stretch:
                for i in range(count):
                    place = hidden + (first_panel + i) * size * 32
                    normalise_panel(place, a[INPUT_NORM], f[N_INPUT], f[N_INPUT + 1], size, plain + i * size * 32)
                normed = stretch
            kind, part, head = QUERY, Q, unit
            if unit >= num_heads + num_kv_heads:
                kind, part, head = VALUE, V, unit - num_heads - num_kv_heads
            elif unit >= num_heads:
                kind, part, head = KEY, K, unit - num_heads
            weight, bias = rows_of(a[kind], s[kind], head * dim, dim, size, room, codes), a[kind + 1]
            todo = claim(claims, turn)
            for i in range(0, count, 2):
                pair = min(2, count - i)
                for r in range(0, dim, 32):
                    multiply(
                        weight + r * input_stride, 16 * input_stride, input_stride, plain + i * size * 32, size * 32,
                        size, scratch + r * 64, dim * 64, pair,
                    )  # fmt: skip
                for j in range(pair):
                    panel, line = first_panel + i + j, scratch + j * dim * 64
                    if has_adapters:
                        add_adapters(ups[layer, part], low_rank, panel, head * dim, dim, line)
                    if bias != 0:
                        add_panel_bias(line, bias + head * dim * 2, dim)
                    if kind == QUERY and a[QUERY_NORM] != 0:
                        scale_panel(line, a[QUERY_NORM], f[N_QUERY], f[N_QUERY + 1], dim)
                    elif kind == KEY and a[KEY_NORM] != 0:
                        scale_panel(line, a[KEY_NORM], f[N_KEY], f[N_KEY + 1], dim)
                    if kind != VALUE:
                        turn_panel(line, cos + turned + panel * dim * 64, sin + turned + panel * dim * 64, dim)
                    if kind == QUERY:
                        shorten_panel(line, dim, queries + (panel * num_heads + head) * dim * 32)
                        continue
                    turn_to_rows(line, dim, lines, 2 * dim)
                    pool = a[KEY_POOL] if kind == KEY else a[VALUE_POOL]
                    for t in range(min(16, num_tokens - 16 * panel)):
                        place = pool + (slots[group, 16 * panel + t] * num_kv_heads + head) * dim * 2
                        copy_row(lines + t * 2 * dim, place, dim)
        turn += 1
        if not meet(barrier, num_threads):
            return
        begin_turn(claims, turn)
        todo = parts[group, 0] + claim(claims, turn)
        while todo < parts[group, 1]:
            sequence, kv_head, first, last = units[todo, 0], units[todo, 1], units[todo, 2], units[todo, 3]
            begin_key, end_key, place = units[todo, 4], units[todo, 5], units[todo, 6]
            results = partials + place * result_bytes(dim) if place >= 0 else plain + sizes[CHUNK_BYTES]
            attend_panels(
                queries, a[KEY_POOL], a[VALUE_POOL], rows + 8 * sequences[group, sequence], begin_key, end_key,
                items[first:last], visible + 128 * first, kv_head, num_heads, num_kv_heads, scale, f[N_SOFT_CAP],
                a[SINKS], plain, results, place >= 0, dim,
            )  # fmt: skip
            todo = parts[group, 0] + claim(claims, turn)
        turn += 1
        if not meet(barrier, num_threads):
            return
        if parts[group, 2] < parts[group, 3]:
            begin_turn(claims, turn)
            todo = parts[group, 2] + claim(claims, turn)
            while todo < parts[group, 3]:
                panel, head, first, apart = merges[todo, 0], merges[todo, 1], merges[todo, 2], merges[todo, 3]
                merge_spans(
                    partials + first * result_bytes(dim), apart * result_bytes(dim), merges[todo, 4], a[SINKS], head,
                    queries + (panel * num_heads + head) * dim * 32, scale, dim,
                )  # fmt: skip
                todo = parts[group, 2] + claim(claims, turn)
            turn += 1
            if not meet(barrier, num_threads):
                return
        for first_panel in range(0, num_panels, GROUP_PANELS):
            count = min(GROUP_PANELS, num_panels - first_panel)
            here, operands = hidden + first_panel * size * 32, queries + first_panel * attended * 32
            if has_adapters:
                narrow_panels(
                    downs[layer, OUTPUT_INPUT], low_rank, first_panel, count, operands, attended, scratch, claims, turn
                )
                turn += 1
                if not meet(barrier, num_threads):
                    return
            project(
                a[OUTPUT], s[OUTPUT], a[OUTPUT_BIAS], size, operands, attended, here, first_panel, count, wide,
                a[ATTENTION_NORM], ups[layer, O], low_rank, scratch, room, claims, turn, codes,
            )  # fmt: skip
            turn += 1
            if not meet(barrier, num_threads):
                return
            if a[ATTENTION_NORM] != 0:
                add_normalised(
                    here, wide, a[ATTENTION_NORM], f[N_ATTENTION], f[N_ATTENTION + 1], size, count, claims, turn
                )
                turn += 1
                if not meet(barrier, num_threads):
                    return
            for i in range(count):
                normalise_panel(here + i * size * 32, a[MLP_NORM], f[N_MLP], f[N_MLP + 1], size, plain + i * size * 32)
            if has_adapters:
                narrow_panels(
                    downs[layer, MLP_INPUT], low_rank, first_panel, count, plain, size, scratch, claims, turn
                )  # fmt: skip
                turn += 1
                if not meet(barrier, num_threads):
                    return
            begin_turn(claims, turn)
            todo = claim(claims, turn)
            while todo < mlp_size // 16:
                n = 16 * todo
                gate = rows_of(a[GATE], s[GATE], n, 16, size, room, codes)
                up = rows_of(a[UP], s[UP], n, 16, size, room + 16 * input_stride, codes)
                todo = claim(claims, turn)
                for i in range(0, count, 2):
                    pair = min(2, count - i)
                    multiply(
                        gate, up - gate, input_stride, plain + i * size * 32, size * 32, size, scratch, 32 * 64, pair
                    )
                    for j in range(pair):
                        panel = scratch + j * 32 * 64
                        if has_adapters:
                            number = first_panel + i + j
                            add_adapters(ups[layer, GATE_PART], low_rank, number, n, 16, panel)
                            add_adapters(ups[layer, UP_PART], low_rank, number, n, 16, panel + 16 * 64)
                        if a[GATE_BIAS] != 0:
                            add_panel_bias(panel, a[GATE_BIAS] + 2 * n, 16)
                        if a[UP_BIAS] != 0:
                            add_panel_bias(panel + 16 * 64, a[UP_BIAS] + 2 * n, 16)
                        place = gated + (i + j) * mlp_size * 32 + n * 32
                        gate_panel(panel, f[N_GATE_LINEAR], f[N_GATE_CUBIC], place)
            turn += 1
            if not meet(barrier, num_threads):
                return
            if has_adapters:
                narrow_panels(
                    downs[layer, DOWN_INPUT], low_rank, first_panel, count, gated, mlp_size, scratch, claims, turn
                )
                turn += 1
                if not meet(barrier, num_threads):
                    return
            project(
                a[DOWN], s[DOWN], a[DOWN_BIAS], size, gated, mlp_size, here, first_panel, count, wide, a[MLP_OUT_NORM],
                ups[layer, DOWN_PART], low_rank, scratch, room, claims, turn, codes,
            )  # fmt: skip
            turn += 1
            if not meet(barrier, num_threads):
                return
            if a[MLP_OUT_NORM] != 0:
                add_normalised(here, wide, a[MLP_OUT_NORM], f[N_MLP_OUT], f[N_MLP_OUT + 1], size, count, claims, turn)
                turn += 1
                if not meet(barrier, num_threads):
                    return
    load_configuration(saved)
    meet(barrier, num_threads)
