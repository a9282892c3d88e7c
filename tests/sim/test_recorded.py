"""A recording is read in order of arrival, and replays to the hits of the engine that made it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from engine.engine_fakes import make_engine, run

from anaphora import SamplingParams
from anaphora.engine.recorder import TraceRecorder
from anaphora.errors import TraceError
from anaphora.sim import TraceRequest
from anaphora.sim.reading import read_trace
from anaphora.sim.timed import TimedOptions, replay_timed

HEADER = {"format": "anaphora-trace", "version": 1, "block_size": 4}
LATE = {"timestamp": 9, "input_length": 6, "output_length": 4, "hash_ids": [1, 2], "output_hash_ids": [3]}
EARLY = {"timestamp": 2.5, "input_length": 4, "output_length": 0, "hash_ids": [1], "cached_tokens": 0}


def written(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_lines_come_as_requests_ended_and_are_read_as_they_arrived(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t", HEADER, LATE, EARLY))
    assert trace.block_size == 4
    assert trace.requests == (
        TraceRequest(2.5, 4, 0, (1,), (), 0),
        TraceRequest(9, 6, 4, (1, 2), (3,)),
    )
    assert trace.recorded_hit_rate is None  # one line does not say


def test_requests_of_one_time_are_read_in_the_order_in_which_the_engine_took_them(tmp_path: Path) -> None:
    lines = [EARLY | {"arrival": arrival, "output_length": arrival} for arrival in (2, 0, 1)]
    trace = read_trace(written(tmp_path / "t", HEADER, *lines))
    assert [request.output_length for request in trace.requests] == [0, 1, 2]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([HEADER | {"version": 2}], "line 1: the header says format 'anaphora-trace', version 2"),
        ([HEADER | {"format": "other"}], "line 1: the header says format 'other'"),
        ([HEADER | {"block_size": 0}], "line 1: the header is broken: block_size must be an integer >= 1, got 0"),
        ([HEADER | {"block_size": True}], "line 1: the header is broken: block_size must be an integer >= 1, got True"),
        ([HEADER, EARLY, HEADER], "line 3: a second header"),
    ],
)
def test_a_file_that_cannot_be_understood_is_not_saved_by_skipping(
    tmp_path: Path, entries: list[object], reason: str
) -> None:
    with pytest.raises(TraceError, match=reason):
        read_trace(written(tmp_path / "t", *entries, EARLY), skip_bad=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"output_hash_ids": [3, 4]},
            "6 input and 4 output tokens fill 1 blocks of 4 after the prompt's full ones, got 2",
        ),
        ({"output_hash_ids": [1]}, "an id comes twice"),
        ({"hash_ids": [1]}, "6 input tokens take 2 ids of 4, got 1"),
        ({"cached_tokens": 7}, "cached_tokens must be at most 6, got 7"),
        ({"arrival": -1}, "arrival must be an integer >= 0, got -1"),
    ],
)
def test_broken_lines(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = written(tmp_path / "t", HEADER, EARLY, LATE | changes)
    with pytest.raises(TraceError, match=f"line 3: {reason}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (trace.num_skipped, len(trace.requests)) == (1, 1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_blocks", [40, 200])
def test_requests_that_run_together_replay_to_the_same_hits(tmp_path: Path, seed: int, num_blocks: int) -> None:
    """All at once through the real scheduler, with chunks, preemptions and evictions: timed, plan for plan."""
    draw = random.Random(seed)
    engine, _, clock = make_engine(num_blocks=num_blocks, max_num_batched_tokens=24, max_num_seqs=6)
    engine.recorder = TraceRecorder(tmp_path / "t", block_size=4, start_s=clock())
    stems = [[draw.randrange(200) for _ in range(draw.randrange(4, 60))] for _ in range(4)]
    for number in range(30):
        prompt = draw.choice(stems) + [draw.randrange(200) for _ in range(draw.randrange(1, 20))]
        params = SamplingParams(max_tokens=draw.randrange(1, 30), temperature=0.0)
        engine.add_request(f"r{number}", prompt, params, cache_salt=draw.choice(["a", None]))
    outputs, _ = run(engine)
    engine.recorder.close()
    live = engine.stats().counters
    trace = read_trace(tmp_path / "t")
    options = TimedOptions(max_num_batched_tokens=24, max_num_seqs=6)
    result = replay_timed(trace, num_blocks, 4, options=options)
    assert [times.num_cached_tokens for times in result.times] == [
        outputs[f"r{number}"].num_cached_tokens for number in range(30)
    ]
    assert result.counters == live
    assert live.num_hit_tokens > 0
