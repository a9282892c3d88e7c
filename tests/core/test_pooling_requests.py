"""Claims: an embedding of all positions finds nothing, never waits for another and is found by others; one of the last
token is a prompt like any."""

from __future__ import annotations

import pytest
from core_plans import summary

from anaphora.core.cache_manager import CacheManager
from anaphora.core.plan import Embedding, StepResult
from anaphora.core.request import Request
from anaphora.core.scheduler import Scheduler
from anaphora.pooling_params import PoolingParams
from anaphora.sampling_params import SamplingParams, embedding_params


def make(num_blocks: int = 12, budget: int = 64, threshold: int | None = None) -> Scheduler:
    cache = CacheManager(num_blocks, 4)
    return Scheduler(cache, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)


def add(scheduler: Scheduler, name: str, pooling: str | None, length: int = 11) -> Request:
    sampling = SamplingParams(max_tokens=1) if pooling is None else embedding_params(PoolingParams(pooling))
    request = Request(name, range(length), sampling)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    from anaphora.core.plan import SampledToken

    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, StepResult({one.request_id: SampledToken(7) for one in plan.scheduled if one.sample}))
    return summary(plan)


@pytest.mark.parametrize(("pooling", "start", "counts"), [("last", 8, (22, 8, 0)), ("mean", 0, (11, 0, 11))])
def test_what_is_found_and_how_it_counts(pooling: str, start: int, counts: tuple[int, int, int]) -> None:
    scheduler = make()
    add(scheduler, "a", None)
    step(scheduler)
    request = add(scheduler, "e", pooling)
    assert step(scheduler) == [("e", start, 11 - start)]
    assert (request.finish_reason, request.num_cached_tokens, request.num_output_tokens) == ("length", start, 0)
    counters = scheduler.stats().counters
    assert (counters.num_queried_tokens, counters.num_hit_tokens, counters.num_bypassed_tokens) == counts
    assert scheduler.stats().gauges.num_live_blocks == 0


def test_pooling_all_follows_nobody_and_leads_others() -> None:
    scheduler = make(budget=8, threshold=6)
    add(scheduler, "mean", "mean")
    add(scheduler, "last", "last")
    assert step(scheduler) == [("mean", 0, 6)]
    assert scheduler.stats().gauges.num_following == 1
    assert step(scheduler) == [("mean", 6, 5), ("last", 8, 3)]
    scheduler = make(budget=8, threshold=6)
    add(scheduler, "a", None)
    add(scheduler, "token", "token")
    assert step(scheduler) == [("a", 0, 6), ("token", 0, 2)]


def test_after_a_preemption_it_begins_at_its_first_token() -> None:
    scheduler = make(budget=5)
    request = add(scheduler, "e", "mean")
    assert step(scheduler) == [("e", 0, 5)]
    assert scheduler.reset_prefix_cache(preempt_running=True)
    assert step(scheduler) == [("e", 0, 5)]
    assert (request.num_preemptions, scheduler.stats().counters.num_bypassed_tokens) == (1, 11)


def test_rows_of_an_embedding_are_its_numbers() -> None:
    from array import array

    embedding = Embedding(array("f", [1.0, -2.5, 0.0, 4.0, 5.0, 6.0]).tobytes(), 3)
    assert embedding.num_rows == 2
    assert embedding.rows() == [[1.0, -2.5, 0.0], [4.0, 5.0, 6.0]]
