"""Claim: a server warms up unless it is told not to; other commands do if they are told to."""

from __future__ import annotations

from typing import Any

import pytest

from anaphora.cli.main import main
from anaphora.config import EngineConfig
from anaphora.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "flags", "expected"),
    [
        (["serve", "smollm2-135m", "--port", "0"], [], True),
        (["serve", "smollm2-135m", "--port", "0"], ["--no-warm-up"], False),
        (["serve", "smollm2-135m", "--port", "0"], ["--warm-up"], True),
        (["generate", "x"], [], None),
        (["generate", "x"], ["--warm-up"], True),
    ],
)
def test_who_warms_up(
    monkeypatch: pytest.MonkeyPatch, command: list[str], flags: list[str], expected: bool | None
) -> None:
    configs: list[EngineConfig] = []

    def build_engine(config: EngineConfig, **options: Any) -> Any:
        configs.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr("anaphora.api.build.build_engine", build_engine)
    assert main([*command, *flags]) == 2
    assert [config.warm_up for config in configs] == [expected]
