"""Claims: the CPU kernels give what formulas in float64 give, the same bits at every run, on every kind of CPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from anaphora.runtime.cpu_step import CpuStep, tiles_allowed
from anaphora.runtime.decoder import NotRecognisedError
from anaphora.runtime.fast_forward import FastForward, make_forward
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.inputs import build_inputs
from anaphora.runtime.kernels import step, tiles
from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.linear import linear, prepare
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.recogniser import recognise
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
@pytest.mark.parametrize(("count", "outputs"), [(64, 64), (96, 83), (576, 49), (100, 37), (31, 45)])
def test_linear_parts(dtype: torch.dtype, use_tiles: bool, num_rows: int, count: int, outputs: int) -> None:
    if use_tiles and count % 32:
        pytest.skip("vectors compute these")
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


@pytest.mark.parametrize(("dtype", "use_tiles"), WAYS)
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(dtype: torch.dtype, use_tiles: bool) -> None:
    count, outputs = 96, 83
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, count, generator=generator).to(dtype)
    weight = torch.randn(outputs, count, generator=generator).to(dtype)
    element, scratch = (0,) * dtype.itemsize, np.zeros(1024, np.uint8)
    if use_tiles:
        load_tiles()
    results = []
    for num_rows in (1, 2, 3, 4, 6, 17):
        operands, out = np.zeros(32 * count * 4, np.uint8), np.zeros((32, outputs), np.float32)
        prepare(x.data_ptr(), count * dtype.itemsize, num_rows, count, operands.ctypes.data, use_tiles, element)
        linear(
            operands.ctypes.data, num_rows, weight.data_ptr(), count, 0, outputs, out.ctypes.data, 4 * outputs,
            scratch.ctypes.data, use_tiles, element,
        )  # fmt: skip
        results.append(out[:num_rows])
    for result in results[:-1]:
        assert np.array_equal(result, results[-1][: len(result)])


def bfloat16_llama():  # type: ignore[no-untyped-def]
    return make("LlamaConfig", "LlamaForCausalLM", head_dim=32, num_hidden_layers=3)


def windowed_gemma():  # type: ignore[no-untyped-def]
    """Four norms a layer, soft caps of scores and logits, a window that the steps leave behind; two groups."""
    return make("Gemma2Config", "Gemma2ForCausalLM", head_dim=64, num_hidden_layers=3, sliding_window=100)


MODELS = [pytest.param(bfloat16_llama, id="llama"), pytest.param(windowed_gemma, id="gemma")]


def run_steps(module, forward, plans: list[list[tuple[int, list[int]]]]):  # type: ignore[no-untyped-def]
    """Logits of every token of every step, of two sequences."""
    layout = inspect_model(module, 512)
    groups = range(len(layout.cache.groups))
    tables = BlockTables(len(groups), 2, 512, 16, CPU)
    tables.append(
        [(row, [list(range(1 + 64 * g + 32 * row, 33 + 64 * g + 32 * row)) for g in groups]) for row in (0, 1)]
    )
    num_blocks = 1 + 64 * len(groups)
    cache = KVCache(layout.places, num_blocks=num_blocks, block_size=16, dtype=layout.dtype, device=CPU)
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


@pytest.mark.parametrize("make_module", MODELS)
def test_bfloat16_steps_are_as_near_to_float32_as_the_librarys(make_module: Callable[[], Any]) -> None:
    module = make_module()
    truth = run_steps(module, PagedForward(module), plans())
    module = module.to(torch.bfloat16)
    forward = make_forward(module, inspect_model(module, 512), fast=True)
    assert isinstance(forward, FastForward)
    assert forward._kernels
    fast, library = run_steps(module, forward, plans()), run_steps(module, PagedForward(module), plans())
    for right, ours, theirs in zip(truth, fast, library, strict=True):
        for a, b, c in zip(right, ours, theirs, strict=True):
            assert float((b - a).norm()) < 1.25 * float((c - a).norm())


@pytest.mark.parametrize("make_module", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_at_every_run_whatever_the_number_of_threads(
    dtype: torch.dtype, make_module: Callable[[], Any]
) -> None:
    module = make_module().to(dtype)
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


def test_what_the_kernels_cannot_do_is_said() -> None:
    with pytest.raises(NotRecognisedError, match="its heads, of 24, are no multiple of 16 up to 256"):
        CpuStep(recognise(make("LlamaConfig", "LlamaForCausalLM", head_dim=24)), 4, 2)
    with pytest.raises(NotRecognisedError, match="its weights are torch"):
        CpuStep(recognise(make_tiny_llama().to(torch.float16)), 4, 2)
    with pytest.raises(NotRecognisedError, match="activation is neither SiLU nor GELU in its tanh form"):
        CpuStep(recognise(make("LlamaConfig", "LlamaForCausalLM", hidden_act="gelu")), 4, 2)


def test_layers_of_other_sizes_are_not_read_as_the_first_one_is() -> None:
    module = make("LlamaConfig", "LlamaForCausalLM")
    mlp = module.model.layers[1].mlp
    for part, shape in ((mlp.gate_proj, (96, 64)), (mlp.up_proj, (96, 64)), (mlp.down_proj, (64, 96))):
        part.weight = torch.nn.Parameter(torch.randn(shape))
    with pytest.raises(NotRecognisedError, match="its layers' weights are not of the same sizes and dtype"):
        CpuStep(recognise(module), 4, 2)


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
    others = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("kernel_attention", "kernels_codes")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, *others, "-k"]
    command += ["test_linear_parts and 576 or test_attention and (64-3-3 or 128-1-8) or bfloat16_steps "]
    command[-1] += "or within_a_window and shapes4 or soft_caps or sixteenth and 80"
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
