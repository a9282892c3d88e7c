"""Generated traffic is a function of its arguments, has the shape that its kind says, and can be written and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from anaphora.errors import ConfigError, TraceError
from anaphora.sim import Trace, replay_sequential
from anaphora.sim.reading import read_trace
from anaphora.sim.sequential import unbounded_blocks
from anaphora.sim.workloads import KINDS, generate_trace, workload
from anaphora.sim.writing import write_trace

NAMES = [made.kind for made in KINDS]


def hit_rate(trace: Trace) -> float:
    most = unbounded_blocks(trace, trace.block_size, with_outputs=True)
    return replay_sequential(trace, most, trace.block_size, with_outputs=True).hit_rate


@pytest.mark.parametrize("kind", NAMES)
def test_the_same_seed_gives_the_same_trace_and_another_one_another(kind: str) -> None:
    made = generate_trace(workload(kind, requests=50, seed=3))
    assert made == generate_trace(workload(kind, requests=50, seed=3))
    assert made.requests != generate_trace(workload(kind, requests=50, seed=4)).requests
    assert len(made.requests) == 50
    times = [request.timestamp_ms for request in made.requests]
    assert times == sorted(times)


def test_a_seed_means_the_same_everywhere_and_tomorrow() -> None:
    first = generate_trace(workload("chat", requests=2, seed=3), 512).requests[0]
    assert (first.timestamp_ms, first.input_length, first.output_length, first.hash_ids) == FIRST_CHAT_OF_SEED_3


FIRST_CHAT_OF_SEED_3 = (318.818, 775, 191, (0, 1))


@pytest.mark.parametrize("kind", NAMES)
def test_written_and_read_it_is_the_same(tmp_path: Path, kind: str) -> None:
    for size in (16, 512):
        made = generate_trace(workload(kind, requests=30), size)
        write_trace(made, tmp_path / "t")
        trace = read_trace(tmp_path / "t")
        assert (trace.block_size, trace.requests) == (size, made.requests)
    assert (tmp_path / "t").read_text().startswith('{"timestamp"')  # Mooncake's own has no header


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot write the trace"):
        write_trace(generate_trace(workload("chat", requests=1)), tmp_path / "none" / "t")


def test_requests_come_at_the_rate_and_of_the_lengths_asked_for() -> None:
    trace = generate_trace(
        workload(
            "shared-prefix", requests=4000, rate=5.0, groups=400, shared_tokens=50, own_tokens=40, output_tokens=20
        )
    )
    assert trace.requests[-1].timestamp_ms / 1000 == pytest.approx(4000 / 5.0, rel=0.1)
    assert trace.num_input_tokens / 4000 == pytest.approx(90, rel=0.1)
    assert sum(request.output_length for request in trace.requests) / 4000 == pytest.approx(20, rel=0.1)


def test_more_own_tokens_mean_less_to_share() -> None:
    little, much = (generate_trace(workload("shared-prefix", requests=200, own_tokens=own)) for own in (20, 2000))
    assert hit_rate(little) > 0.8 > 0.5 > hit_rate(much)


@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_a_later_turn_hits_all_of_the_earlier_one_but_its_last_block(kind: str) -> None:
    trace = generate_trace(workload(kind, requests=300))
    generated = {number for request in trace.requests for number in request.output_hash_ids}
    reused = [request for request in trace.requests if generated & set(request.hash_ids)]
    assert len(reused) > 100
    assert hit_rate(trace) > 0.75


def test_documents_are_shared_only_behind_the_same_ones() -> None:
    """Four documents a prompt, the popular ones first: the first is often hit, all four together seldom."""
    trace = generate_trace(workload("rag", requests=300, groups=30, shared_tokens=160))
    assert 0.15 < hit_rate(trace) < 0.6


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"requests": 10**9},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"groups": 0},
        {"own_tokens": -1},
        {"output_tokens": 10**9},
        {"shared_tokens": 100_000, "groups": 100_000},
    ],
    ids=str,
)
def test_what_cannot_be_made(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="of a workload must be"):
        workload("chat", **wrong)  # type: ignore[arg-type]


def test_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match="must be one of shared-prefix, chat, agents, rag, got 'x'"):
        workload("x")
