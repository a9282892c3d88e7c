"""The demo: its claims hold on a tiny model, and each kind of broken engine makes the claim about it fail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anaphora.cli.demo import open_stage
from anaphora.cli.demo_acts import Act, Engine, Stage, counter_examples, eight_at_once, run_acts, two_questions
from anaphora.cli.demo_claims import LOGPROB_TOLERANCE, NEAR_TIE, same_answers
from anaphora.cli.main import main
from anaphora.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


@pytest.fixture(scope="module")
def stage(tiny_model: Path) -> Stage:
    return open_stage(str(tiny_model), None)


@pytest.fixture(scope="module")
def acts(stage: Stage) -> list[Act]:
    """A whole run, without the one claim about time: a busy machine must not turn a test red."""
    return [
        dataclasses.replace(act, claims=tuple(claim for claim in act.claims if not claim.text.startswith("TTFT")))
        for act in run_acts(stage)
    ]


class Broken:
    """An engine that changes what another one is asked or answers."""

    def __init__(
        self,
        engine: Engine,
        answer: Callable[[RequestOutput], RequestOutput] = lambda output: output,
        *,
        keeps_salt: bool = True,
    ) -> None:
        self._engine = engine
        self._answer = answer
        self._keeps_salt = keeps_salt

    def generate(self, prompts: Any, params: Any, *, cache_salt: str | None = None) -> list[RequestOutput]:
        outputs = self._engine.generate(prompts, params, cache_salt=cache_salt if self._keeps_salt else None)
        return [self._answer(output) for output in outputs]

    def stats(self) -> Any:
        return self._engine.stats()

    def reset_prefix_cache(self) -> bool:
        return self._engine.reset_prefix_cache()


def failing(act: Act) -> list[str]:
    return [claim.text for claim in act.claims if not claim.holds and not claim.text.startswith("TTFT")]


def with_completion(output: RequestOutput, **changes: Any) -> RequestOutput:
    return dataclasses.replace(output, outputs=[dataclasses.replace(output.outputs[0], **changes)])


def test_every_claim_holds_on_a_sound_engine(acts: list[Act]) -> None:
    assert [failing(act) for act in acts] == [[], [], []]
    assert [len(act.claims) for act in acts] == [9, 7, 8]
    first, second, plain = acts[0].rows
    assert (first.hits, plain.hits) == (0, 0)
    assert second.hits > 3000 and second.hits % 16 == 0
    assert acts[2].rows[0].computed_tokens * 6 < acts[2].rows[1].computed_tokens


def test_an_engine_that_reports_too_many_cached_tokens_fails(stage: Stage) -> None:
    lying = Broken(
        stage.cached, lambda output: dataclasses.replace(output, num_cached_tokens=output.num_cached_tokens + 16)
    )
    failed = failing(two_questions(dataclasses.replace(stage, cached=lying)))
    assert len(failed) == 2 and all("cached tokens" in text for text in failed)


def test_an_engine_that_answers_otherwise_fails(stage: Stage) -> None:
    def other_token(output: RequestOutput) -> RequestOutput:
        *rest, last = output.outputs[0].token_ids
        return with_completion(output, token_ids=[*rest, last ^ 1])

    failed = failing(two_questions(dataclasses.replace(stage, cached=Broken(stage.cached, other_token))))
    assert failed == ["second question: tokens equal those with caching off"]


def test_an_engine_whose_logprobs_drift_fails(stage: Stage) -> None:
    def drifted(output: RequestOutput) -> RequestOutput:
        logprobs = [
            {token_id: dataclasses.replace(entry, logprob=entry.logprob - 0.01) for token_id, entry in position.items()}
            for position in output.outputs[0].logprobs or []
        ]
        return with_completion(output, logprobs=logprobs)

    failed = failing(two_questions(dataclasses.replace(stage, cached=Broken(stage.cached, drifted))))
    assert failed == ["second question: so do their logprobs (float32)"]


def test_an_engine_that_never_reuses_fails(stage: Stage) -> None:
    failed = failing(eight_at_once(dataclasses.replace(stage, cached=stage.uncached)))
    assert failed == ["computed tokens = S + Σ(P - S)", "Δhits = 7 S"]


def test_an_engine_that_ignores_salts_fails(stage: Stage) -> None:
    deaf = Broken(stage.cached, keeps_salt=False)
    assert failing(counter_examples(dataclasses.replace(stage, cached=deaf))) == ["another salt: hits"]


def test_a_pool_that_evicts_nothing_fails(stage: Stage) -> None:
    roomy = dataclasses.replace(stage, small=stage.cached)
    assert failing(counter_examples(roomy))[-2:] == [
        "small pool, other tokens: every block of the first request is evicted",
        "small pool, evicted before the hit: hits",
    ]


def output_of(token_ids: list[int], gap: float, logprob: float = -0.5) -> RequestOutput:
    """Each token was chosen with this logprob, another (token 99) with `gap` less."""
    logprobs = [{token_id: Logprob(logprob, 1), 99: Logprob(logprob - gap, 2)} for token_id in token_ids]
    completion = CompletionOutput(0, "", token_ids, logprobs, "length")
    return RequestOutput("r", None, [1], 0, [completion], True, RequestMetrics(0.0, e2e_s=0.0))


@pytest.mark.parametrize(("gap", "holds"), [(NEAR_TIE / 2, True), (NEAR_TIE * 2, False)], ids=["near-tie", "clear"])
def test_a_token_may_differ_at_a_near_tie_only(gap: float, holds: bool) -> None:
    tokens, logprobs = same_answers("x", [output_of([1, 2, 4], gap)], [output_of([1, 2, 3], gap)])
    assert (tokens.holds, logprobs.holds) == (holds, True)
    assert tokens.expected == ("2 tokens" if holds else "3 tokens")


@pytest.mark.parametrize("one", [[1, 2], [1, 2, 3, 4], []], ids=["shorter", "longer", "empty"])
def test_answers_of_other_lengths_differ(one: list[int]) -> None:
    tokens, _ = same_answers("x", [output_of(one, 1.0)], [output_of([1, 2, 3], 1.0)])
    assert not tokens.holds


@pytest.mark.parametrize("logprob", [-0.5 - 2 * LOGPROB_TOLERANCE, float("nan")], ids=["too far", "NaN"])
def test_logprobs_must_be_close_and_numbers(logprob: float) -> None:
    _, logprobs = same_answers("x", [output_of([1], 1.0, logprob)], [output_of([1], 1.0)])
    assert not logprobs.holds


def test_the_command_ends_with_1_if_a_claim_fails(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    deaf = dataclasses.replace(stage, cached=Broken(stage.cached, keeps_salt=False))
    monkeypatch.setattr("anaphora.cli.demo.open_stage", lambda model, num_threads: deaf)
    monkeypatch.setattr("anaphora.cli.demo.run_acts", lambda stage: iter([counter_examples(stage)]))
    assert main(["demo"]) == 1
    shown = capfd.readouterr().out
    assert shown.count("FAILS") == 1
    assert shown.endswith("6 of 7 claims hold\n")
    assert main(["demo", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["holds"] is False


def test_the_command_ends_with_0_and_one_document(
    stage: Stage, acts: list[Act], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anaphora.cli.demo.open_stage", lambda model, num_threads: stage)
    monkeypatch.setattr("anaphora.cli.demo.run_acts", lambda stage: iter(acts))
    assert main(["demo", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["holds"] is True
    assert [len(act["rows"]) for act in document["acts"]] == [3, 8, 2]
    assert main(["demo"]) == 0
    assert capfd.readouterr().out.endswith("24 of 24 claims hold\n")
