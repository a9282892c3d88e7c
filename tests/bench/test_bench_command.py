"""`anaphora bench` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_world import Live

from anaphora.bench.in_process import engine_specs, parse_options
from anaphora.cli.main import main
from anaphora.errors import ConfigError

SMALL = ("--prefixes", "64", "--outputs", "1", "--concurrency", "1", "--sharers", "2", "--repeats", "1")


def test_engine_and_server_in_one_run(
    tiny_folder: Path, bench_server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.jsonl"
    command = ["bench", "-m", str(tiny_folder), "--url", f"served={bench_server.url}", *SMALL, "--json"]
    command += ["--engine", "num_threads=1", "--variant", "slow:fast_forward=false", "--interference", "0,1.5"]
    command += ["--state", str(state), "--markdown", str(tmp_path / "b.md"), "--csv", str(tmp_path / "b.csv")]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    name = str(tiny_folder)
    assert [target["name"] for target in document["targets"]] == [name, f"{name} (caching off)", "slow", "served"]
    hits = {
        (row["target"], row["interference"]): row["cached_tokens"]
        for row in document["rows"]
        if row["phase"] == "warm" and row["kind"] == "sweep"
    }
    assert hits == {
        (name, 0.0): 3 * 64,
        (f"{name} (caching off)", 0.0): 0,
        ("slow", 0.0): 3 * 64,
        ("served", 0.0): 3 * 64,
        (name, 1.5): 0,
        (f"{name} (caching off)", 1.5): 0,
        ("slow", 1.5): 0,
        ("served", 1.5): 0,
    }
    held = {(entry["target"], entry["kind"]): entry["holds"] for entry in document["counter_examples"]}
    assert {kind for target, kind in held if target == "served"} == {
        "exact-repeat",
        "first-token-differs",
        "other-salt",
        "evicted-before",
    }
    assert all(holds for (target, _), holds in held.items() if target != f"{name} (caching off)")
    assert {entry["target"] for entry in document["not_run"]} == {f"{name} (caching off)"}
    fields = {"prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "e2e_s", "concurrency", "case", "target"}
    assert all(fields <= request.keys() for request in document["requests"])
    assert "## What the data shows" in (tmp_path / "b.md").read_text(encoding="utf-8")
    assert (tmp_path / "b.csv").read_text(encoding="utf-8").count("\n") == len(document["rows"]) + 1
    assert not state.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefixes", "0"], "--prefixes must be integers >= 1"),
        (["--concurrency", "a"], "--concurrency must be integers >= 1"),
        (["--interference", "x"], "--interference must be numbers"),
        (["--interference", "nan"], "interference must be shares"),
        (["--caching", "maybe"], "--caching must be"),
        (["--suffix", "0"], "suffix must be at least 1"),
        (["--url", "nowhere"], "must look like http"),
        (["--engine", "colour=red"], "field of EngineConfig"),
        (["--engine", "num_blocks=4"], "num_blocks is not to be set here"),
        (["--engine", "block_size=x"], "block_size must be an integer"),
        (["--repeats", "0"], "Invalid value"),
        (["--variant", "fast"], "--variant must look like"),
        (["--token-range", "9"], "--token-range must look like LOW:HIGH"),
        (["--url", "a=http://h", "--url", "a=http://i"], "two targets have one name: a, a"),
    ],
)
def test_wrong_options_are_refused_before_anything_loads(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "--state", str(tmp_path / "state"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_not_written_down(
    bench_server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["anaphora", "bench", "--api-key", "hidden", "--api-key=hidden"])
    command = ["bench", "--url", bench_server.url, "--api-key", "hidden", "--token-range", "8:200", *SMALL, "--json"]
    assert main([*command, "--sharers", "none", "--no-counter-examples", "--state", str(tmp_path / "s")]) == 0
    out, err = capsys.readouterr()
    assert "hidden" not in out + err
    assert json.loads(out)["command"] == "anaphora bench --api-key ... --api-key=..."


def test_options_of_an_engine_are_json_or_text() -> None:
    assert parse_options(["max-num-seqs=8", "fast_forward=False", "num_threads=null", "dtype=bfloat16"]) == {
        "max_num_seqs": 8,
        "fast_forward": False,
        "num_threads": None,
        "dtype": "bfloat16",
    }


def test_every_model_runs_with_caching_on_and_off_and_its_variants() -> None:
    specs = engine_specs(["a", "b"], {"block_size": 8}, ["wide:max_num_seqs=9,block_size=4"], [True, False])
    assert [(spec.name, spec.config.enable_prefix_caching, spec.config.block_size) for spec in specs] == [
        ("a", True, 8),
        ("a (caching off)", False, 8),
        ("a wide", True, 4),
        ("b", True, 8),
        ("b (caching off)", False, 8),
        ("b wide", True, 4),
    ]
    with pytest.raises(ConfigError):
        engine_specs(["a"], {}, ["x:"], [True])
