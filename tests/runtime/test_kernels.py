"""Claims: the CPU kernels give what formulas in float64 give, the same bits at every run, on every kind of CPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_architecture import make
from tiny_llama import ids, make_tiny_llama

pytest.importorskip("numba")

from anaphora.core.groups import FullAttention
from anaphora.core.ids import RequestId, TokenId
from anaphora.core.plan import ScheduledRequest
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.chunks import cut_into_chunks
from anaphora.runtime.cpu_step import CpuStep, tiles_allowed
from anaphora.runtime.decoder import NotRecognisedError, recognise
from anaphora.runtime.fast_forward import FastForward, make_forward
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.inputs import StepInputs, build_inputs
from anaphora.runtime.kernels import attention, step, tiles
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.linear import linear, prepare
from anaphora.runtime.kernels.products import spread
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.threads import ThreadTeam

FULL = [FullAttention()]

CPU = torch.device("cpu")
HAS_TILES = bool(step.has_tile_unit()) and tiles_allowed()
WAYS = [
    pytest.param(torch.float32, False, id="float32"),
    pytest.param(torch.bfloat16, False, id="bfloat16"),
    pytest.param(torch.bfloat16, True, id="tiles", marks=pytest.mark.skipif(not HAS_TILES, reason="no tile unit")),
]


@kernel
def configure(address):  # type: ignore[no-untyped-def]
    tiles.load_configuration(address)


def load_tiles() -> None:
    configuration = np.frombuffer(tiles.configuration(), dtype=np.uint8)
    configure(configuration.ctypes.data)


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("count", "outputs"), [(64, 64), (96, 83), (576, 49)])
def test_linear_parts(dtype: torch.dtype, use_tiles: bool, num_rows: int, count: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    padded = -(-num_rows // 16) * 16
    x = torch.randn(padded, count, generator=generator).to(dtype)
    x[num_rows:] = torch.nan
    weight = torch.randn(outputs, count, generator=generator).to(dtype)
    operands, out = np.zeros(padded * count * 4, np.uint8), np.full((padded, outputs), 7, np.float32)
    element, scratch = (0,) * dtype.itemsize, np.zeros(1024, np.uint8)
    if use_tiles:
        load_tiles()
    prepare(x.data_ptr(), count * dtype.itemsize, num_rows, count, operands.ctypes.data, use_tiles, element)
    for begin, end in ((0, 32), (32, outputs)):
        linear(
            operands.ctypes.data, num_rows, weight.data_ptr(), count, begin, end, out.ctypes.data, 4 * outputs,
            scratch.ctypes.data, use_tiles, element,
        )  # fmt: skip
    expected = x[:num_rows].double() @ weight.double().T
    assert (torch.from_numpy(out)[:num_rows] - expected).abs().max() < 1e-4


def request(start: int, n: int) -> ScheduledRequest:
    return ScheduledRequest(RequestId("r"), start, tuple(TokenId(100 + i) for i in range(n)), (), True)


def sequences(generator: torch.Generator, shapes: list[tuple[int, int]], block_size: int) -> StepInputs:
    """Block tables in random order, the first two sequences sharing what full blocks they can."""
    width = max(-(-(start + n) // block_size) for start, n in shapes)
    tables = BlockTables(1, len(shapes), width * block_size, block_size, CPU)
    free = (1 + torch.randperm(len(shapes) * width, generator=generator)).tolist()
    for row, (start, n) in enumerate(shapes):
        shared = tables.ids[0, 0, : min(shapes[0][0], start) // block_size].tolist() if row == 1 else []
        need = -(-(start + n) // block_size) - len(shared)
        tables.append([(row, [[*shared, *[free.pop() for _ in range(need)]]])])
    return build_inputs([request(*shape) for shape in shapes], list(range(len(shapes))), tables, FULL, torch.float32)


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
@pytest.mark.parametrize(
    ("shapes", "block_size"),
    [
        ([(0, 1)], 16),
        ([(15, 1), (16, 1), (17, 1)], 16),
        ([(255, 1), (256, 1), (511, 1), (512, 1), (0, 1), (3, 1), (700, 1), (31, 1)], 16),
        ([(300, 1), (290, 1)], 16),  # a shared beginning
        ([(512, 24), (513, 1), (0, 9), (250, 12)], 16),
        ([(77, 5), (90, 1), (254, 3)], 3),
        ([(40, 20)], 1),
        ([(600, 13), (128, 2)], 64),
    ],
)
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group"), [(64, 3, 3), (32, 2, 1), (128, 1, 8), (96, 1, 5), (256, 1, 2), (64, 1, 4)]
)
def test_attention(
    dtype: torch.dtype,
    use_tiles: bool,
    shapes: list[tuple[int, int]],
    block_size: int,
    head_dim: int,
    kv_heads: int,
    group: int,
) -> None:
    generator = torch.Generator().manual_seed(head_dim + group)
    inputs = sequences(generator, shapes, block_size)
    positions = inputs.position_ids[0].numpy()
    chunks = cut_into_chunks(inputs.groups[0].calls, positions, block_size, attention.CHUNK_TOKENS)
    num_slots = int(max(int(call.block_ids.max()) for call in inputs.groups[0].calls) + 1) * block_size
    keys = torch.full((num_slots, kv_heads, head_dim), torch.nan, dtype=dtype)
    values = keys.clone()
    for call in inputs.groups[0].calls:
        length = (call.end - call.begin) // call.num_seqs
        for number, blocks in enumerate(call.block_ids.view(call.num_seqs, -1).tolist()):
            last = int(positions[call.begin + (number + 1) * length - 1])
            slots = [blocks[p // block_size] * block_size + p % block_size for p in range(last + 1)]
            keys[slots] = torch.randn(last + 1, kv_heads, head_dim, generator=generator).to(dtype)
            values[slots] = torch.randn(last + 1, kv_heads, head_dim, generator=generator).to(dtype)
    num_tokens, heads, scale = len(positions), kv_heads * group, 0.2
    query = torch.randn(num_tokens, heads, head_dim, generator=generator).to(dtype)
    operands = np.zeros(query.numel(), np.float32)
    element, dims = (0,) * dtype.itemsize, (0,) * (head_dim // 16)
    spread_line(query.data_ptr(), operands.ctypes.data, query.numel(), element)
    rows = chunks.slots * (kv_heads * head_dim * dtype.itemsize)
    count = int(chunks.token_partials[-1])
    tops, sums = np.zeros((count, heads), np.float32), np.zeros((count, heads), np.float32)
    partials = np.zeros((count, heads, head_dim), np.float32)
    scores = np.zeros(group * attention.CHUNK_TOKENS, np.float32)
    room = np.zeros(attention.tile_bytes(head_dim), np.uint8)
    if use_tiles:
        load_tiles()
    for item, (begin, end) in enumerate(chunks.items):
        common = (keys.data_ptr(), values.data_ptr(), rows[item].ctypes.data)
        readers = tuple(array[begin:end] for array in (chunks.tokens, chunks.visible, chunks.partials))
        sizes = (heads, kv_heads, np.float32(scale))
        results = (tops, sums, partials, dims, element)
        if use_tiles:
            attention.attend_chunk_by_tiles(query.data_ptr(), *common, *readers, *sizes, room.ctypes.data, *results)
        else:
            attention.attend_chunk(operands.ctypes.data, *common, *readers, *sizes, scores, *results)
    out = torch.empty(num_tokens, heads, head_dim, dtype=dtype)
    for t in range(num_tokens):
        for head in range(heads):
            begin, end = chunks.token_partials[t : t + 2]
            place = out[t, head].data_ptr()
            attention.merge(begin, end, head, np.float32(scale), tops, sums, partials, place, head_dim, element)

    for call in inputs.groups[0].calls:
        length = (call.end - call.begin) // call.num_seqs
        for number, blocks in enumerate(call.block_ids.view(call.num_seqs, -1).tolist()):
            for t in range(call.begin + number * length, call.begin + (number + 1) * length):
                slots = [blocks[p // block_size] * block_size + p % block_size for p in range(positions[t] + 1)]
                k = keys[slots].double().repeat_interleave(group, dim=1)
                v = values[slots].double().repeat_interleave(group, dim=1)
                weights = (torch.einsum("hd,thd->ht", query[t].double(), k) * scale).softmax(dim=-1)
                expected = torch.einsum("ht,thd->hd", weights, v)
                tolerance = 1e-5 if dtype == torch.float32 else 2.0**-8 * float(expected.abs().max()) + 4e-3
                assert (out[t].double() - expected).abs().max() < tolerance


@kernel
def spread_line(source, out, count, element):  # type: ignore[no-untyped-def]
    spread(source, out, count, element)


def bfloat16_llama():  # type: ignore[no-untyped-def]
    return make("LlamaConfig", "LlamaForCausalLM", head_dim=32, num_hidden_layers=3)


def run_steps(module, forward, plans: list[list[tuple[int, list[int]]]]):  # type: ignore[no-untyped-def]
    """Logits of every token of every step, of two sequences."""
    layout = inspect_model(module, 512)
    tables = BlockTables(1, 2, 512, 16, CPU)
    tables.append([(0, [list(range(1, 33))]), (1, [list(range(33, 65))])])
    cache = KVCache(layout.places, num_blocks=65, block_size=16, dtype=layout.dtype, device=CPU)
    results = []
    with torch.inference_mode():
        for plan in plans:
            scheduled = [
                ScheduledRequest(RequestId(str(row)), start, tuple(TokenId(t) for t in tokens), (), True)
                for row, (start, tokens) in enumerate(plan)
            ]
            inputs = build_inputs(scheduled, list(range(len(plan))), tables, layout.cache.groups, layout.dtype)
            context = PagedContext(cache, layout.layers, inputs.groups)
            keep = torch.arange(inputs.input_ids.shape[1])
            logits, hidden = forward(inputs.input_ids, inputs.position_ids, keep, context)
            results.append((logits.float(), hidden.float()))
    return results


def plans() -> list[list[tuple[int, list[int]]]]:
    a, b = ids(1, 450), ids(2, 400)
    return [
        [(0, a[:300]), (0, b[:200])],
        [(300, a[300:301]), (200, b[200:201])],
        [(301, a[301:308])],
        [(308, a[308:340]), (201, b[201:230])],
        [(340, a[340:341]), (230, b[230:238])],
    ]


def test_bfloat16_steps_are_as_near_to_float32_as_the_librarys() -> None:
    module = bfloat16_llama()
    truth = run_steps(module, PagedForward(module), plans())
    module = module.to(torch.bfloat16)
    forward = make_forward(module, inspect_model(module, 512), fast=True)
    assert isinstance(forward, FastForward)
    assert forward._kernels
    fast, library = run_steps(module, forward, plans()), run_steps(module, PagedForward(module), plans())
    for right, ours, theirs in zip(truth, fast, library, strict=True):
        for a, b, c in zip(right, ours, theirs, strict=True):
            assert float((b - a).norm()) < 1.25 * float((c - a).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_at_every_run_whatever_the_number_of_threads(dtype: torch.dtype) -> None:
    module = bfloat16_llama().to(dtype)
    results = []
    for num_threads in (1, 2, 3, 2):
        torch.set_num_threads(num_threads)
        # one forward for all steps, and torch's own products (which may use the tile unit as well) in between
        results.append(run_steps(module, make_forward(module, inspect_model(module, 512), fast=True), plans()[1:]))
    torch.set_num_threads(1)
    for result in results[1:]:
        for (logits, hidden), (first_logits, first_hidden) in zip(result, results[0], strict=True):
            assert torch.equal(logits, first_logits)
            assert torch.equal(hidden, first_hidden)


def test_torchs_own_tiles_are_left_as_they_were() -> None:
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(96, 256).bfloat16()
    expected = torch.nn.functional.linear(x, w)
    module = bfloat16_llama().to(torch.bfloat16)
    forward = make_forward(module, inspect_model(module, 512), fast=True)
    for _ in range(3):
        run_steps(module, forward, plans()[1:3])
        assert torch.equal(torch.nn.functional.linear(x, w), expected)


def test_chunks_that_hold_the_same_blocks_are_read_once() -> None:
    tables = BlockTables(1, 2, 1024, 16, CPU)
    tables.append([(0, [list(range(1, 41))]), (1, [[*range(1, 33), *range(50, 58)]])])
    inputs = build_inputs([request(600, 1), request(620, 1)], [0, 1], tables, FULL, torch.float32)
    chunks = cut_into_chunks(inputs.groups[0].calls, inputs.position_ids[0].numpy(), 16, 256)
    # Longest first: token 0 is the second request. Two shared chunks of 256, then one of each.
    assert [(chunks.tokens[a:b].tolist(), chunks.visible[a:b].tolist()) for a, b in chunks.items] == [
        ([0, 1], [256, 256]),
        ([0, 1], [256, 256]),
        ([0], [109]),
        ([1], [89]),
    ]
    assert chunks.partials.tolist() == [0, 3, 1, 4, 2, 5]
    assert chunks.slots[2, :109].tolist() == list(range(50 * 16, 50 * 16 + 109))
    assert set(chunks.slots[2, 109:].tolist()) == {50 * 16 + 108}


def test_what_the_kernels_cannot_do_is_said() -> None:
    with pytest.raises(NotRecognisedError, match="its sizes are no multiples of 32"):
        CpuStep(recognise(make_tiny_llama().to(torch.bfloat16)), 4, 2)
    with pytest.raises(NotRecognisedError, match="activation is not SiLU"):
        CpuStep(recognise(make("LlamaConfig", "LlamaForCausalLM", hidden_act="gelu")), 4, 2)


def test_without_numba_torch_decodes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("anaphora.runtime.cpu_step", "anaphora.runtime.panel_step"):
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("anaphora.runtime.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    module = make_tiny_llama()
    with caplog.at_level(logging.INFO, "anaphora.runtime"):
        forward = make_forward(module, inspect_model(module, 512), fast=True)
    assert isinstance(forward, FastForward)
    assert forward._kernels == ()
    assert "pip install numba" in caplog.text


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="names features of x86")
def test_a_cpu_with_short_registers_gives_the_same_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k"]
    command += ["test_linear_parts and 576 or test_attention and (64-3-3 or 128-1-8) or bfloat16_steps"]
    features = (
        "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+sse4.1,+sse4.2,+ssse3,+sse3,+sse2,+sse,+cmov,+cx8,+64bit"
    )
    environment = os.environ | {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    if "NUMBA_CPU_NAME" in os.environ:
        pytest.skip("this is that run")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_failure_on_another_thread_is_raised_and_the_team_goes_on() -> None:
    team, seen = ThreadTeam(3, 24), set()

    def fail(number: int) -> None:
        if number == 2:
            raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        team.run(fail, lambda: None)
    team.run(lambda number: seen.add(number), lambda: None)
    assert seen == {0, 1, 2}


def test_threads_do_not_wait_for_one_that_never_began() -> None:
    from anaphora.runtime.kernels import barrier

    team = ThreadTeam(2, barrier.BARRIER_SIZE)
    address, met = team.barrier.ctypes.data, []

    def work(number: int) -> None:
        if number == 0:
            raise KeyboardInterrupt
        met.append(barrier.meet(address, 2))

    def abandon() -> None:
        team.barrier[barrier.ABANDONED] = 1

    with pytest.raises(KeyboardInterrupt):
        team.run(work, abandon)
    assert met == [False]
