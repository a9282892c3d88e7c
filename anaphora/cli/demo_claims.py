"""Statements with the value expected and the value found, and the comparison of two answers. Plain data, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.engine.outputs import RequestOutput

LOGPROB_TOLERANCE = 1e-3
"""In nats, between a run with and a run without the cache, both in float32. Reuse changes the shapes of the matrices
and so the order of additions: differences of 1e-5 are ordinary, wrong K/V differ by more than 1e-1."""

NEAR_TIE = 1e-4
"""Two best tokens closer than this (in nats) may swap for the same reason; only then may a token differ."""


@dataclass(frozen=True)
class Claim:
    """One statement with the value it expects and the value found."""

    text: str
    expected: str
    found: str
    holds: bool


def equal(text: str, expected: object, found: object) -> Claim:
    """The claim that two values are the same."""
    return Claim(text, _show(expected), _show(found), expected == found)


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def same_answers(label: str, cached: Sequence[RequestOutput], uncached: Sequence[RequestOutput]) -> tuple[Claim, Claim]:
    """Token for token and logprob for logprob: what the cache gives is what the model gives without it."""
    pairs = [_compare(one, two) for one, two in zip(cached, uncached, strict=True)]
    num_tokens = sum(pair.num_tokens for pair in pairs)
    num_equal = sum(pair.num_equal for pair in pairs)
    num_ties = sum(pair.near_tie for pair in pairs)
    differences = [difference for pair in pairs for difference in pair.differences]
    ties = f", {num_ties} cut short at a near-tie" if num_ties else ""
    return (
        Claim(
            f"{label}: tokens equal those with caching off",
            f"{num_tokens:,} tokens",
            f"{num_equal:,} tokens{ties}",
            num_tokens == num_equal > 0,
        ),
        Claim(
            f"{label}: so do their logprobs (float32)",
            f"within {LOGPROB_TOLERANCE:g}",
            f"{max(differences, default=0.0):.1e}",
            bool(differences) and all(difference <= LOGPROB_TOLERANCE for difference in differences),
        ),
    )


@dataclass(frozen=True)
class _Comparison:
    num_tokens: int
    num_equal: int
    near_tie: bool
    differences: tuple[float, ...]


def _compare(cached: RequestOutput, uncached: RequestOutput) -> _Comparison:
    """After a near-tie that fell the other way the two texts are different questions: the comparison ends before it."""
    one, two = cached.outputs[0], uncached.outputs[0]
    num_tokens, near_tie = max(len(one.token_ids), len(two.token_ids)), False
    differences: list[float] = []
    steps = zip(one.token_ids, two.token_ids, one.logprobs or (), two.logprobs or (), strict=False)
    for token_id, other_id, logprobs, other in steps:
        if token_id != other_id:
            best, second = sorted((entry.logprob for entry in other.values()), reverse=True)[:2]
            if best - second < NEAR_TIE:
                num_tokens, near_tie = len(differences), True
            break
        differences.append(abs(logprobs[token_id].logprob - other[other_id].logprob))
    return _Comparison(num_tokens, len(differences), near_tie, tuple(differences))
