"""HA10: ratios of the control plane, and counts. Step 7 is in tests/server/test_lifecycle.

Processor time of this thread, so that neighbours count as little as can be. Noise only adds to it: the least of several
runs, in turn, comes down to the true value; a true cliff stays.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from subject import params, start
from tiny_llama import ids

from anaphora import LLM
from anaphora.bench.intervals import median_interval
from anaphora.core import BlockChain, CacheManager, Request, SampledToken, Scheduler, StepResult
from anaphora.core.hashing import pack_tokens
from anaphora.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=1)
MIN_ROUNDS, MAX_ROUNDS = 10, 100


def worst_ratio(limit: float, *actions: Callable[[], float]) -> float:
    """Largest over smallest of the least seconds that each action reports, after as many rounds as it takes."""
    least = [float("inf")] * len(actions)
    gc.collect()
    for number in range(1, MAX_ROUNDS + 1):
        least = [min(seconds, action()) for seconds, action in zip(least, actions, strict=True)]
        if number >= MIN_ROUNDS and max(least) / min(least) <= limit:
            break
    return max(least) / min(least)


class Filler:
    """Puts prompts of 64 new blocks through the cache: admitted, staged, committed, freed."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = CacheManager(num_blocks, 16)
        self.num_blocks = num_blocks
        self.number = 0

    def put(self, num_blocks: int) -> float:
        """Seconds per block, without hashing."""
        spent = 0.0
        for _ in range(num_blocks // 64):
            self.number += 1
            request = Request(str(self.number), [self.number, *range(64 * 16 - 1)], PARAMS)
            self.cache.register(request)
            begin = time.thread_time()
            assert self.cache.admit(request, self.cache.look_up(request))
            self.cache.commit(self.cache.stage(request, request.num_tokens))
            self.cache.free(request)
            spent += time.thread_time() - begin
        return spent / num_blocks


def full_pool(num_blocks: int) -> Filler:
    filler = Filler(num_blocks)
    filler.put(num_blocks)
    assert filler.cache.pool.free_queue.num_blank == 0  # GUARD
    return filler


@pytest.mark.timing
@pytest.mark.parametrize("num_blocks", [1024, 8192, 65536])
def test_a_full_pool_allocates_like_an_empty_one(num_blocks: int) -> None:
    full = full_pool(num_blocks)
    assert worst_ratio(5, lambda: Filler(num_blocks).put(1024), lambda: full.put(1024)) <= 5
    assert full.cache.pool.num_evicted >= MIN_ROUNDS * 1024  # GUARD


@pytest.mark.timing
def test_a_large_full_pool_allocates_like_a_small_one() -> None:
    small, large = full_pool(1024), full_pool(65536)
    assert worst_ratio(2, lambda: small.put(1024), lambda: large.put(1024)) <= 2


@pytest.mark.timing
def test_look_up_time_does_not_depend_on_the_number_of_entries() -> None:
    times = []
    for num_entries in (2 * 1024, 256 * 1024):
        filler = Filler(num_entries)
        filler.put(num_entries - 1024)
        prompt = ids(2900, 16_001)
        warm = Request("warm", prompt, PARAMS)
        filler.cache.register(warm)
        assert filler.cache.admit(warm, filler.cache.look_up(warm))
        filler.cache.commit(filler.cache.stage(warm, warm.num_tokens))
        filler.cache.free(warm)

        def look_up(filler: Filler = filler, prompt: list[int] = prompt) -> float:
            request = Request("look", prompt, PARAMS)
            filler.cache.register(request)
            begin = time.thread_time()
            hit = filler.cache.look_up(request)
            spent = time.thread_time() - begin
            assert hit.num_tokens == 16_000
            return spent

        times.append(look_up)
    assert worst_ratio(2, *times) <= 2


@pytest.mark.timing
def test_hashing_is_linear() -> None:
    def hashing(num_tokens: int) -> float:
        tokens = pack_tokens(range(num_tokens))
        chain = BlockChain(bytes(32), 16)
        begin = time.thread_time()
        chain.extend(tokens)
        return (time.thread_time() - begin) / num_tokens

    lengths = (1024, 8192, 65536, 131072)
    assert worst_ratio(2, *(lambda n=n: hashing(n) for n in lengths)) <= 2


def test_a_waiting_request_is_hashed_once() -> None:
    counted = []

    class Counting:
        def __init__(self, data: bytes) -> None:
            counted.append(len(data))
            self.data = data

        def digest(self) -> bytes:
            return hash(self.data).to_bytes(8, signed=True)

    scheduler = Scheduler(CacheManager(64, 16, hash_function=Counting), max_num_batched_tokens=64, max_num_seqs=1)
    scheduler.add(Request("runs", ids(2901, 32), SamplingParams(max_tokens=900)))
    waits = ids(2902, 960)
    scheduler.add(Request("waits", waits, PARAMS))
    for _ in range(900):
        plan = scheduler.schedule()
        assert plan is not None
        assert [request.request_id for request in plan.scheduled] == ["runs"]  # GUARD: the other one really waits
        scheduler.update(plan, StepResult({"runs": SampledToken(9)}))
    assert len(counted) == 2 + 60 + 900 // 16


def run_alone(scheduler: Scheduler, request: Request) -> None:
    """One request from its arrival to its end, and nothing but the control plane."""
    scheduler.add(request)
    while (plan := scheduler.schedule()) is not None:
        ended = {entry.request_id: SampledToken(9) for entry in plan.scheduled if entry.sample}
        scheduler.update(plan, StepResult(ended))


@pytest.mark.timing
def test_a_long_warm_prompt_costs_no_more_a_token_than_a_short_one() -> None:
    scheduler = Scheduler(CacheManager(1024, 16), max_num_batched_tokens=512)
    numbers = itertools.count()

    def warm(prompt: list[int]) -> float:
        begin = time.thread_time()
        run_alone(scheduler, Request(str(next(numbers)), prompt, PARAMS))
        return (time.thread_time() - begin) / len(prompt)

    short, long = ids(2903, 500), ids(2904, 4000)
    warm(short), warm(long)
    least = [warm(short), warm(long)]
    for number in range(MAX_ROUNDS):
        least = [min(least[0], warm(short)), min(least[1], warm(long))]
        if number >= MIN_ROUNDS and least[1] <= 2 * least[0]:
            break
    assert scheduler.stats().counters.num_hit_tokens >= MIN_ROUNDS * (496 + 3984)  # GUARD
    assert least[1] <= 2 * least[0]


@pytest.mark.timing
def test_misses_cost_little() -> None:
    """A miss costs tens of microseconds of hashing, committing and evicting; a step of this model, 0.3 ms.

    The same prompts both ways, in turn, until the median of the ratios is known to be on one side of the limit.
    """

    def seconds(llm: LLM, prompts: list[list[int]]) -> float:
        begin = time.thread_time()
        llm.generate(prompts, params(8))
        return time.thread_time() - begin

    on, off = (start(num_blocks=128, enable_prefix_caching=enabled) for enabled in (True, False))
    ratios = []
    for number in range(MAX_ROUNDS // 3):
        prompts = [ids(20_000 + 30 * number + i, 60) for i in range(30)]
        spent = {llm: seconds(llm, prompts) for llm in ((on, off) if number % 2 else (off, on))}
        ratios.append(spent[on] / spent[off])
        ratio = median_interval(ratios)
        if number >= MIN_ROUNDS and not ratio.low <= 1 / 0.95 <= ratio.high:
            break
    assert on.stats().counters.num_hit_tokens == 0  # GUARD
    assert ratio.low <= 1 / 0.95, f"the cache costs {ratio.median - 1:.1%} of the time of prompts that miss"


def test_hits_are_used(fresh: Callable[..., Any]) -> None:
    llm = fresh(num_blocks=400, max_num_batched_tokens=1024)
    stem = ids(2905, 1000)
    llm.generate([stem], params(1))
    before = llm.stats().counters
    outputs = llm.generate([stem + ids(2906 + number, 20) for number in range(16)], params(1))
    after = llm.stats().counters
    assert [output.num_cached_tokens for output in outputs] == [992] * 16  # GUARD
    assert after.num_computed_prompt_tokens - before.num_computed_prompt_tokens == 16 * (1020 - 992)
    # All of them fit in one step; over HTTP they come one by one.
    assert after.num_steps - before.num_steps <= (1 if hasattr(llm, "engine") else 16)


def test_nothing_is_kept_of_prompts_but_what_the_pool_holds() -> None:
    scheduler = Scheduler(CacheManager(64, 16), max_num_batched_tokens=512)

    def num_objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for number in range(2000):
        run_alone(scheduler, Request(str(number), [number % 97, *range(number, number + 40)], PARAMS))
    after_2000 = num_objects()
    for number in range(2000, 20_000):
        run_alone(scheduler, Request(str(number), [number % 97, *range(number, number + 40)], PARAMS))
    assert scheduler.stats().counters.num_evicted_blocks > 20_000  # GUARD
    assert num_objects() <= 1.01 * after_2000


@pytest.mark.timing
def test_no_step_among_many_cached_blocks_is_a_pause() -> None:
    """The same decode several times: a true pause comes back at the same step, noise does not."""

    def decode() -> list[float]:
        filler = Filler(65_536 + 400)
        filler.put(65_536)
        scheduler = Scheduler(filler.cache, max_num_batched_tokens=64)
        scheduler.add(Request("long", ids(2907, 32), SamplingParams(max_tokens=5000)))
        gc.collect()
        seconds = []
        for _ in range(5000):
            begin = time.thread_time()
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(plan, StepResult({"long": SampledToken(9)}))
            seconds.append(time.thread_time() - begin)
        assert filler.cache.pool.free_queue.num_blank < 400  # GUARD
        return seconds

    least = decode()
    for _ in range(8):
        ordered = sorted(least)
        if ordered[-5] <= 10 * ordered[len(ordered) // 2]:
            return
        least = list(map(min, least, decode()))
    raise AssertionError(f"p99.9 {sorted(least)[-5]:.6f} s, median {sorted(least)[2500]:.6f} s")
