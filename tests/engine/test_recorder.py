"""A recording says when requests came, how long they were and which beginnings they shared, and nothing else."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine.engine_fakes import make_engine, run

from anaphora import EngineConfig, SamplingParams
from anaphora.engine import recorder as recorder_module
from anaphora.engine.engine import Engine
from anaphora.engine.recorder import TraceRecorder, check_recordable
from anaphora.errors import ConfigError

NINE = SamplingParams(max_tokens=9, temperature=0.0)
PROMPT = list(range(30, 40))  # 10 tokens: two full blocks of 4 and a tail of 2


def recording(path: Path, engine: Engine, **options: int) -> TraceRecorder:
    engine.recorder = TraceRecorder(path, block_size=engine.block_size, start_s=engine.clock(), **options)
    return engine.recorder


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def one_after_the_other(engine: Engine, *requests: tuple[list[int], str | None]) -> None:
    for number, (prompt, salt) in enumerate(requests):
        engine.add_request(f"r{number}", prompt, NINE, cache_salt=salt)
        run(engine)


def test_a_line_says_lengths_blocks_and_the_hit(tmp_path: Path) -> None:
    engine, _, clock = make_engine()
    recorder = recording(tmp_path / "t", engine)
    clock.now_s += 1.5
    one_after_the_other(engine, (PROMPT, None), (PROMPT, None))
    recorder.close()
    header, first, second = entries(tmp_path / "t")
    assert header == {"format": "anaphora-trace", "version": 1, "block_size": 4}
    ids = first.pop("hash_ids"), first.pop("output_hash_ids")
    assert list(map(len, ids)) == [3, 2]  # 18 of 19 tokens are computed: 4 full blocks, of which the prompt fills 2
    assert first == {"timestamp": 1500.0, "input_length": 10, "output_length": 9, "cached_tokens": 0, "arrival": 0}
    assert (second["cached_tokens"], second["arrival"]) == (8, 1)
    assert (second["hash_ids"], second["output_hash_ids"]) == ids  # the same content has the same ids


def test_the_next_turn_begins_with_the_ids_of_the_last_one(tmp_path: Path) -> None:
    engine, _, _ = make_engine()
    recorder = recording(tmp_path / "t", engine)
    engine.add_request("a", PROMPT, NINE)
    outputs, _ = run(engine)
    engine.add_request("b", [*PROMPT, *outputs["a"].outputs[0].token_ids, 7], NINE)
    run(engine)
    recorder.close()
    _, first, second = entries(tmp_path / "t")
    assert second["hash_ids"][:4] == first["hash_ids"][:2] + first["output_hash_ids"]
    assert second["cached_tokens"] == 16


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:3]], ids=["blocks", "less than a block"])
def test_salts_and_recordings_share_no_id(tmp_path: Path, prompt: list[int]) -> None:
    seen: list[set[int]] = []
    for name in ("one", "two"):
        engine, _, _ = make_engine()
        recorder = recording(tmp_path / name, engine)
        one_after_the_other(engine, (prompt, "a"), (prompt, "b"), (prompt, None))
        recorder.close()
        seen += [{*entry["hash_ids"], *entry["output_hash_ids"]} for entry in entries(tmp_path / name)[1:]]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_without_prefix_caching_the_ids_are_there_all_the_same(tmp_path: Path) -> None:
    engine, _, _ = make_engine(enable_prefix_caching=False)
    recorder = recording(tmp_path / "t", engine)
    one_after_the_other(engine, (PROMPT, None), (PROMPT, None))
    recorder.close()
    _, first, second = entries(tmp_path / "t")
    assert len(first["hash_ids"] + first["output_hash_ids"]) == 5
    assert second["hash_ids"] == first["hash_ids"]
    assert second["cached_tokens"] == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_ids_are_those_of_the_weights_that_computed_them(tmp_path: Path, enable_prefix_caching: bool) -> None:
    engine, _, _ = make_engine(enable_prefix_caching=enable_prefix_caching)
    recorder = recording(tmp_path / "t", engine)
    one_after_the_other(engine, (PROMPT, None), (PROMPT, None))
    engine._scheduler.cache.replace_root(b"of other weights")
    one_after_the_other(engine, (PROMPT, None))
    recorder.close()
    _, first, second, third = entries(tmp_path / "t")
    assert second["hash_ids"] == first["hash_ids"]
    assert not {*third["hash_ids"]} & {*first["hash_ids"]}


def test_who_never_got_blocks_is_not_recorded_and_who_was_aborted_is(tmp_path: Path) -> None:
    engine, _, _ = make_engine(num_blocks=3)
    recorder = recording(tmp_path / "t", engine)
    engine.add_request("runs", PROMPT, NINE)
    engine.add_request("waits", PROMPT[::-1], NINE)
    engine.step()
    engine.step()
    engine.abort(["runs", "waits"])
    recorder.close()
    (_, only) = entries(tmp_path / "t")
    assert (only["arrival"], only["output_length"], len(only["hash_ids"])) == (0, 2, 3)


def test_a_full_disk_ends_the_recording_with_one_warning_and_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t"
    engine, _, _ = make_engine()
    recorder = recording(path, engine)
    one_after_the_other(engine, (PROMPT, None))
    recorder.flush()
    before = path.read_bytes()
    write = os.write

    def half_then_full(file: int, data: memoryview) -> int:
        if len(data) > 20:
            return write(file, data[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder_module.os, "write", half_then_full)
    with caplog.at_level(logging.WARNING):
        one_after_the_other(engine, (PROMPT[:8], None))  # a multiple of 20 bytes or not: the rest fails
        recorder.flush()
        one_after_the_other(engine, (PROMPT, None), (PROMPT, None))
    recorder.close()
    assert path.read_bytes() == before
    assert [record.message for record in caplog.records if "recording" in record.message] == [
        f"recording to {path} stops, No space left on device: what is there can be replayed"
    ]
    assert recorder.num_left_out == 2


def test_more_than_can_be_written_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer waits for a disk: one request is in its hands, two in the queue, the other two are left out."""
    engine, _, _ = make_engine()
    recorder = recording(tmp_path / "t", engine, max_waiting=2)
    held, write = __import__("threading").Event(), os.write
    begun = __import__("threading").Event()

    def slow(file: int, data: memoryview) -> int:
        begun.set()
        assert held.wait(30)
        return write(file, data)

    monkeypatch.setattr(recorder_module.os, "write", slow)
    one_after_the_other(engine, (PROMPT, None))
    assert begun.wait(30)
    with caplog.at_level(logging.WARNING):
        one_after_the_other(engine, *[(PROMPT, None)] * 4)
    held.set()
    recorder.close()
    assert [entry["arrival"] for entry in entries(tmp_path / "t")[1:]] == [0, 1, 2]
    assert recorder.num_left_out == 2
    assert len([record for record in caplog.records if "left out" in record.message]) == 1


def test_a_recording_begins_in_a_new_file_of_the_owner_only(tmp_path: Path) -> None:
    engine, _, _ = make_engine()
    recording(tmp_path / "t", engine).close()
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
    for path in (tmp_path / "t", tmp_path / "none" / "t"):
        with pytest.raises(ConfigError, match="record: "):
            check_recordable(path)
        with pytest.raises(ConfigError, match="record: "):
            recording(path, engine)


@pytest.mark.parametrize("wrong", [3, "", True])
def test_the_option_must_be_a_path(wrong: object) -> None:
    with pytest.raises(ConfigError, match="record must be the path"):
        EngineConfig(model="m", record=wrong)  # type: ignore[arg-type]


PROGRAM = """
import sys
from pathlib import Path
from engine.engine_fakes import make_engine, run
from anaphora import SamplingParams
from anaphora.engine.recorder import TraceRecorder
engine, _, _ = make_engine()
engine.recorder = TraceRecorder(Path(sys.argv[1]), block_size=4, start_s=0.0)
for number in range(200):
    engine.add_request(str(number), [number] * 40, SamplingParams(max_tokens=3, temperature=0.0))
    run(engine)
    if len(sys.argv) > 2 and number == 100:
        print("half", flush=True)
        engine.recorder.flush()
        print("there", flush=True)
"""


def start(*arguments: str) -> subprocess.Popen:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, env=environment)


def test_a_process_that_just_ends_has_written_everything(tmp_path: Path) -> None:
    process = start(str(tmp_path / "t"))
    assert process.wait(120) == 0
    assert len(entries(tmp_path / "t")) == 201


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    process = start(str(tmp_path / "t"), "stop")
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == [b"half\n", b"there\n"]
    process.send_signal(signal.SIGKILL)
    process.wait(120)
    assert (tmp_path / "t").read_bytes().endswith(b"\n")
    assert len(entries(tmp_path / "t")) >= 102
