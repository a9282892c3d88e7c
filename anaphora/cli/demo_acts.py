"""What the demo does and claims, as plain data. Knows only the face of an engine; prints nothing and loads nothing.

Three acts, each a list of measured rows and of claims with the value expected and the value found:

1. two long requests with one beginning: the second reuses it, and answers as if it had not;
2. three requests that must reuse nothing;
3. eight requests with one beginning at once: it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Protocol

from anaphora.cli.demo_claims import Claim, equal, same_answers
from anaphora.cli.demo_text import FULL_TABLE, ask, boat, register, unrelated
from anaphora.engine.outputs import EngineStats, RequestOutput
from anaphora.sampling_params import SamplingParams

NUM_AT_ONCE = 8
SHORT_TABLE = 20  # rows: about 900 of SmolLM2's tokens; eight of them with caching off still end in reasonable time


class Engine(Protocol):
    """The part of `anaphora.LLM` that the demo uses."""

    def generate(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, *, cache_salt: str | None = None
    ) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    def reset_prefix_cache(self) -> bool: ...


@dataclass(frozen=True)
class Stage:
    """The engines of the demo, all over one loaded model in float32.

    cached, uncached: caching on and off, otherwise the same. small: caching on, `small_num_blocks` usable blocks.
    """

    cached: Engine
    uncached: Engine
    small: Engine
    block_size: int
    small_num_blocks: int


@dataclass(frozen=True)
class Row:
    """One measured run of one or several requests. Counts are tokens, summed over the requests.

    cached_tokens, computed_tokens: as the requests report them, prompts only.
    queries, hits, evicted_blocks: how far the engine's counters went up.
    ttft_s, e2e_s: the slowest request's. answer: of a single request that generates more than one token, else empty.
    """

    label: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    queries: int
    hits: int
    evicted_blocks: int
    ttft_s: float
    e2e_s: float
    answer: str

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


@dataclass(frozen=True)
class Act:
    title: str
    note: str
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)


def run_acts(stage: Stage) -> Iterator[Act]:
    """The acts one by one, as they end, each on an empty cache. Warms up first, so that no row pays for it."""
    for engine in (stage.cached, stage.uncached, stage.small):
        engine.generate([unrelated(2)], _greedy(2))
    yield two_questions(stage)
    yield counter_examples(stage)
    yield eight_at_once(stage)


def two_questions(stage: Stage) -> Act:
    table = register(FULL_TABLE)
    prompts = [ask(table, boat(3)), ask(table, boat(30))]
    emptied = stage.cached.reset_prefix_cache()
    first_row, [first] = _run("first question", stage.cached, prompts[:1], _greedy(16))
    second_row, [second] = _run("second question", stage.cached, prompts[1:], _greedy(16))
    plain_row, [plain] = _run("second, caching off", stage.uncached, prompts[1:], _greedy(16))
    common = _common(first.prompt_token_ids, second.prompt_token_ids)
    reused = _whole(common, stage.block_size)
    length = len(second.prompt_token_ids)
    return Act(
        title="Two long requests, one beginning",
        note=(
            f"They share {common:,} tokens and differ in the question at the end. Block size {stage.block_size}. "
            "A model this small answers badly; what counts is that the cache changes nothing."
        ),
        rows=(first_row, second_row, plain_row),
        claims=(
            equal("the cache was empty before", True, emptied),
            equal("first question: cached tokens", 0, first.num_cached_tokens),
            equal("first question: computed tokens", first_row.prompt_tokens, first_row.computed_tokens),
            equal(f"second question: cached tokens = whole blocks in {common:,}", reused, second.num_cached_tokens),
            equal("second question: computed tokens = the rest", length - reused, second_row.computed_tokens),
            equal("second question: Δqueries = its prompt tokens", length, second_row.queries),
            equal("second question: Δhits = its cached tokens", reused, second_row.hits),
            *same_answers("second question", [second], [plain]),
            Claim(
                "TTFT of the hit is less than half of the cold one",
                f"< {first_row.ttft_s / 2:.3f} s",
                f"{second_row.ttft_s:.3f} s",
                second_row.ttft_s < first_row.ttft_s / 2,
            ),
        ),
    )


def counter_examples(stage: Stage) -> Act:
    emptied = stage.cached.reset_prefix_cache()
    prompt = ask(register(SHORT_TABLE), boat(3))
    cold, [output] = _run("first time", stage.cached, [prompt], _greedy(1))
    token_ids = output.prompt_token_ids
    other = [next(token_id for token_id in token_ids if token_id != token_ids[0]), *token_ids[1:]]
    again, _ = _run("the same again", stage.cached, [prompt], _greedy(1))
    differs, _ = _run("first token differs", stage.cached, [other], _greedy(1))
    salted, _ = _run("another salt", stage.cached, [prompt], _greedy(1), cache_salt="another tenant")

    # As many other tokens as the small pool has slots, less half a block for the output: they take every block.
    short = token_ids[: stage.small_num_blocks * stage.block_size // 2]
    flood = [token_ids[-1], *token_ids[1 : stage.small_num_blocks * stage.block_size - stage.block_size // 2]]
    stage.small.reset_prefix_cache()
    stored, _ = _run("small pool: first time", stage.small, [short], _greedy(1))
    kept, _ = _run("small pool: again", stage.small, [short], _greedy(1))
    flooded, _ = _run("small pool: others fill it", stage.small, [flood], _greedy(1))
    evicted, _ = _run("small pool: evicted", stage.small, [short], _greedy(1))
    num_full = len(short) // stage.block_size
    return Act(
        title="What must not hit",
        note=f"The small pool has {stage.small_num_blocks} blocks. Each refusal stands beside a run that does hit.",
        rows=(cold, again, differs, salted, stored, kept, flooded, evicted),
        claims=(
            equal("the cache was empty before", True, emptied),
            equal("the same again: hits", _reusable(len(token_ids), stage.block_size), again.hits),
            equal("first token differs: hits", 0, differs.hits),
            equal("another salt: hits", 0, salted.hits),
            equal("small pool, the same again: hits", _reusable(len(short), stage.block_size), kept.hits),
            Claim(
                "small pool, other tokens: every block of the first request is evicted",
                f">= {num_full} blocks",
                f"{flooded.evicted_blocks} blocks",
                flooded.evicted_blocks >= num_full,
            ),
            equal("small pool, evicted before the hit: hits", 0, evicted.hits),
        ),
    )


def eight_at_once(stage: Stage) -> Act:
    table = register(SHORT_TABLE)
    prompts = [ask(table, boat(number)) for number in range(NUM_AT_ONCE)]
    emptied = stage.cached.reset_prefix_cache()
    row, outputs = _run("eight at once", stage.cached, prompts, _greedy(8))
    plain_row, plain = _run("the same, caching off", stage.uncached, prompts, _greedy(8))
    token_ids = [output.prompt_token_ids for output in outputs]
    shared = _whole(min(_common(one, two) for one, two in pairwise(token_ids)), stage.block_size)
    longest = max(_whole(_common(one, two), stage.block_size) for one, two in combinations(token_ids, 2))
    suffixes = sum(len(ids) - shared for ids in token_ids)
    total = sum(len(ids) for ids in token_ids)
    return Act(
        title="Eight requests, one beginning, at once",
        note=(
            f"They share S = {shared:,} tokens in whole blocks: S are computed once, then each request's own rest; "
            f"S + Σ(P - S) = {shared:,} + {suffixes:,} of {total:,} tokens. Times are the slowest request's."
        ),
        rows=(row, plain_row),
        claims=(
            equal("the cache was empty before", True, emptied),
            equal("no two of them share more blocks than all do", shared, longest),
            equal("computed tokens = S + Σ(P - S)", shared + suffixes, row.computed_tokens),
            equal("Δqueries = ΣP", total, row.queries),
            equal(f"Δhits = {NUM_AT_ONCE - 1} S", (NUM_AT_ONCE - 1) * shared, row.hits),
            equal("caching off: computed tokens = ΣP", total, plain_row.computed_tokens),
            *same_answers("eight at once", outputs, plain),
        ),
    )


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2, ignore_eos=True)


def _run(
    label: str,
    engine: Engine,
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    cache_salt: str | None = None,
) -> tuple[Row, list[RequestOutput]]:
    before = engine.stats().counters
    outputs = engine.generate(prompts, params, cache_salt=cache_salt)
    delta = engine.stats().counters.delta(before)
    row = Row(
        label=label,
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        computed_tokens=sum(output.metrics.num_computed_prompt_tokens for output in outputs),
        queries=delta.num_queried_tokens,
        hits=delta.num_hit_tokens,
        evicted_blocks=delta.num_evicted_blocks,
        ttft_s=max(output.metrics.ttft_s or 0.0 for output in outputs),
        e2e_s=max(output.metrics.e2e_s for output in outputs),
        answer=outputs[0].outputs[0].text.strip() if len(outputs) == 1 and params.max_tokens > 1 else "",
    )
    return row, outputs


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next(
        (index for index, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two))
    )


def _whole(num_tokens: int, block_size: int) -> int:
    """The tokens of the whole blocks in num_tokens."""
    return num_tokens // block_size * block_size


def _reusable(num_tokens: int, block_size: int) -> int:
    """Most that an exact repeat can reuse: whole blocks, and the last token is always computed."""
    return _whole(num_tokens - 1, block_size)
