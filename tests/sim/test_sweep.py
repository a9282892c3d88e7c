"""A sweep is a pure function of trace and options, and no policy beats the offline optimum."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from sim.trace_builder import random_lines

from anaphora.core.eviction import POLICIES
from anaphora.errors import ConfigError
from anaphora.sim import Trace, TraceRequest, replay_sequential
from anaphora.sim.mooncake import parse_mooncake
from anaphora.sim.offline import offline_optimum
from anaphora.sim.plot import write_plot
from anaphora.sim.sweep import Sweep, run_sweep
from anaphora.sim.timed import TimedOptions

TRACE = parse_mooncake(random_lines(4, 300), "random")


@pytest.mark.parametrize("mode", ["sequential", "timed"])
def test_the_same_input_gives_the_same_bytes(mode: str) -> None:
    trace = Trace("random", 512, TRACE.requests[:40])
    sweep = Sweep(blocks=(20,), policies=tuple(POLICIES), mode=mode)
    assert json.dumps(run_sweep(trace, sweep)) == json.dumps(run_sweep(trace, sweep))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_blocks", [14, 30, 60])
def test_no_policy_beats_the_offline_optimum(seed: int, num_blocks: int) -> None:
    trace = parse_mooncake(random_lines(seed, 300), "random")
    best = replay_sequential(trace, num_blocks, 512, offline_optimum(trace, num_blocks, 512))
    for policy in POLICIES:
        assert replay_sequential(trace, num_blocks, 512, policy).num_hit_tokens <= best.num_hit_tokens


def test_the_offline_optimum_keeps_what_comes_next() -> None:
    """Room for two cached blocks less one: LRU drops 1 for 8 and for 6; the future says that 9 and 7 never return."""
    ids = [1, 9, 8, 1, 7, 6, 1]
    trace = Trace("t", 512, [TraceRequest(0.0, 513, 1, (i, 100 + n)) for n, i in enumerate(ids)])
    assert replay_sequential(trace, 3, 512).num_hit_tokens == 0
    assert replay_sequential(trace, 3, 512, offline_optimum(trace, 3, 512)).num_hit_tokens == 2 * 512


def test_pool_sizes_that_nobody_gave_lead_up_to_the_working_set() -> None:
    document = run_sweep(TRACE, Sweep())
    (sizes,) = document["block_sizes"]
    blocks = [point["num_blocks"] for point in sizes["points"]]
    assert all(2 * larger >= 3 * smaller for smaller, larger in pairwise(blocks))
    assert blocks[-1] == sizes["num_distinct_blocks"]
    assert all(point["num_refused_requests"] == 0 for point in sizes["points"])
    assert sizes["points"][-1]["hit_rate"] <= sizes["unbounded_hit_rate"]


def test_rows_add_up() -> None:
    (sizes,) = run_sweep(TRACE, Sweep(blocks=(30,)))["block_sizes"]
    (point,) = sizes["points"]
    assert point["num_saved_tokens"] + point["num_computed_tokens"] == point["num_prompt_tokens"]
    assert point["hit_rate"] == point["num_saved_tokens"] / TRACE.num_input_tokens


def test_every_replay_is_announced() -> None:
    done: list[int] = []
    sweep = Sweep(blocks=(20, 30), block_sizes=(512, 1024), policies=("lru", "offline"))
    run_sweep(TRACE, sweep, done.append)
    assert sum(done) == sweep.num_replays(TRACE) * len(TRACE.requests) == 10 * 300


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "fast"},
        {"policies": ("fifo",)},
        {"blocks": (0,)},
        {"block_sizes": (-1,)},
        {"policies": ("offline",), "mode": "timed"},
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_anything_runs(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Sweep(**wrong)  # type: ignore[arg-type]


def test_no_requests() -> None:
    for mode in ("sequential", "timed"):
        (sizes,) = run_sweep(Trace("empty", 512, ()), Sweep(mode=mode, timed=TimedOptions()))["block_sizes"]
        assert sizes["unbounded_hit_rate"] == 0.0


def test_a_plot_is_the_same_picture_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    document = run_sweep(TRACE, Sweep(blocks=(20, 60), policies=("lru", "lfu")))
    write_plot([document], tmp_path / "a.png")
    write_plot([document], tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write the plot"):
        write_plot([document], tmp_path / "none" / "c.png")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        write_plot([], tmp_path / "a.png")
