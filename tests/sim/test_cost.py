"""What a step costs: given with units, or fitted to measurements that it then explains."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from anaphora.errors import ConfigError
from anaphora.sim.cost_fit import fit_cost, read_cost
from anaphora.sim.cost_model import CostModel, parse_cost


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("overhead=5ms,token=40us,attention=1.5ns", CostModel(5e-3, 40e-6, 1.5e-9)),
        ("attention=2e-9s, overhead=0.25", CostModel(0.25, CostModel().token_s, 2e-9)),
        ("token=3µs", CostModel(token_s=3e-6)),
    ],
)
def test_costs_have_units(text: str, model: CostModel) -> None:
    assert parse_cost(text).overhead_s == pytest.approx(model.overhead_s)
    assert parse_cost(text).token_s == pytest.approx(model.token_s)
    assert parse_cost(text).attention_s == pytest.approx(model.attention_s)


@pytest.mark.parametrize("text", ["", "overhead", "overhead=", "step=1", "token=1h", "token=1ms,token=2ms", "token=x"])
def test_a_cost_that_says_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match="a cost "):
        parse_cost(text)


@pytest.mark.parametrize("text", ["token=-1ms", "overhead=nan", "token=inf", "overhead=0,token=0"])
def test_a_cost_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cost model|stand still|must look like"):
        parse_cost(text)


def rows(model: CostModel, count: int = 40, noise: float = 0.0) -> list[tuple[int, int, float]]:
    """Measurements that the formula explains, written out here anew: a token attends to itself and all before it."""
    draw, made = random.Random(1), []
    for _ in range(count):
        prompt = draw.randrange(50, 4000)
        cached = draw.choice([0, draw.randrange(0, prompt)])
        pairs = sum(range(cached + 1, prompt + 1))
        ttft_s = model.overhead_s + (prompt - cached) * model.token_s + pairs * model.attention_s
        made.append((prompt, cached, ttft_s + draw.uniform(-noise, noise)))
    return made


def test_a_fit_finds_what_made_the_measurements() -> None:
    model = CostModel(3e-3, 50e-6, 4e-9)
    fitted = fit_cost(rows(model))
    assert fitted.model.overhead_s == pytest.approx(3e-3, rel=1e-6)
    assert fitted.model.token_s == pytest.approx(50e-6, rel=1e-6)
    assert fitted.model.attention_s == pytest.approx(4e-9, rel=1e-6)
    assert fitted.largest_residual_s < 1e-9
    assert fitted.num_requests == 40


def test_residuals_are_what_is_left() -> None:
    fitted = fit_cost(rows(CostModel(3e-3, 50e-6, 4e-9), noise=1e-3))
    assert 3e-4 < fitted.residual_s < 7e-4  # a uniform error of 1 ms has 0.58
    assert fitted.residual_s < fitted.largest_residual_s < 1.5e-3


def test_no_part_of_a_cost_is_negative() -> None:
    """Times that fall with the number of pairs would ask for a negative factor."""
    fitted = fit_cost([(100, 0, 0.010), (200, 0, 0.019), (400, 0, 0.034), (800, 0, 0.050)])
    assert fitted.model.attention_s == 0.0
    assert fitted.model.token_s > 0


def bench(path: Path, *requests: Any) -> Path:
    path.write_text(json.dumps({"requests": list(requests)}))
    return path


def measured(prompt: int, **changes: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "cached_tokens": 0, "ttft_s": 0.01 + prompt * 1e-4, "concurrency": 1} | changes


def test_only_requests_that_ran_alone_are_fitted(tmp_path: Path) -> None:
    alone = [measured(prompt) for prompt in (100, 200, 300)]
    fitted = read_cost(bench(tmp_path / "b", *alone, measured(100, concurrency=8, ttft_s=9.0)))
    assert fitted.num_requests == 3
    assert fitted.model.token_s == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ([], "0 requests of concurrency 1 computed 0 different numbers of tokens"),
        ([measured(100)] * 5, "5 requests of concurrency 1 computed 1 different"),
        ([3], "must be an object"),
        ([measured(100, cached_tokens=100)], "prompt_tokens and cached_tokens must be"),
        ([measured(True)], "prompt_tokens and cached_tokens must be"),
        ([measured(100, cached_tokens=-1)], "prompt_tokens and cached_tokens must be"),
        ([measured(100, ttft_s=None)], "ttft_s must be"),
        ([measured(100, ttft_s=True)], "ttft_s must be"),
        ([measured(100, ttft_s=0)], "ttft_s must be"),
        ([measured(100, ttft_s=float("inf"))], "ttft_s must be"),
        ([measured(100, ttft_s=float("nan"))], "ttft_s must be"),
    ],
)
def test_measurements_that_say_too_little(tmp_path: Path, requests: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--cost-from: .*{reason}"):
        read_cost(bench(tmp_path / "b", *requests))


@pytest.mark.parametrize("text", ["nonsense", "[]", "{}", '{"requests": 3}', "\x00"])
def test_a_file_that_is_no_bench_document(tmp_path: Path, text: str) -> None:
    (tmp_path / "b").write_text(text)
    with pytest.raises(ConfigError, match="--cost-from: "):
        read_cost(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"--cost-from: .*cannot be read"):
        read_cost(tmp_path / "none")
