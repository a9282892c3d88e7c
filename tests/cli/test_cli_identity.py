"""`anaphora models --identity`: what a model is, and the same root as an engine over it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anaphora import LLM
from anaphora.cli.main import main


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["models", "--json", *arguments]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_it_is_the_root_of_an_engine_with_these_options(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = LLM(str(tiny_model), num_blocks=16, block_size=8, dtype="float32").engine
    expected = {"root": engine.root.hex(), "identity": dict(engine.identity)}
    options = ("--identity", str(tiny_model), "--dtype", "float32")
    assert shown(capsys, *options, "--block-size", "8") == expected
    assert shown(capsys, *options)["root"] != expected["root"]


def test_a_table_shows_every_field_whole(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = shown(capsys, "--identity", str(tiny_model))
    assert main(["models", "--identity", str(tiny_model)]) == 0
    text = capsys.readouterr().out
    assert str(document["root"]) in text
    for name, value in document["identity"].items():  # type: ignore[attr-defined]
        assert name in text
        assert len(value) > 80 or value in text


def test_a_model_that_is_not_there_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--identity", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
