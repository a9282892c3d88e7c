"""The curve of other pools: with every block listed it is LRU to the token; with a share of them it is close."""

from __future__ import annotations

import hashlib
import random

import pytest
from core_world import World

from anaphora.core import CacheManager, Request, Scheduler
from anaphora.core.ids import BlockHash
from anaphora.core.plan import SampledToken, StepResult
from anaphora.core.what_if import MAX_LISTED_BLOCKS, WhatIf
from anaphora.errors import ConfigError
from anaphora.sampling_params import SamplingParams

BLOCK_SIZE = 4
PARAMS = SamplingParams(max_tokens=1)


def name(text: str) -> BlockHash:
    return BlockHash(hashlib.sha256(text.encode()).digest())


def walk(draw: random.Random, most: int) -> list[int]:
    """A prompt whose beginning others have, never of full blocks only: those take one block less."""
    blocks = draw.randrange(1, most)
    tokens = [draw.choice((0, 0, 0, 1, 2)) for _ in range(blocks) for _ in range(BLOCK_SIZE)]
    for index in range(blocks):  # a block is one letter, so that beginnings meet often
        tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE] = [tokens[index * BLOCK_SIZE]] * BLOCK_SIZE
    return tokens + [7] * draw.randrange(1, BLOCK_SIZE)


def run(cache: CacheManager, tokens: list[int]) -> int:
    request = Request("r", tokens, PARAMS)
    cache.register(request)
    hit = cache.look_up(request)
    assert cache.admit(request, hit)
    cache.commit(cache.stage(request, request.num_tokens))
    cache.free(request)
    return hit.num_tokens


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_blocks", [24, 40, 100])
def test_with_every_block_listed_the_curve_is_what_lru_pools_of_these_sizes_find(num_blocks: int, seed: int) -> None:
    draw = random.Random(seed)
    prompts = [walk(draw, 9) for _ in range(400)]
    what_if = WhatIf(num_blocks, BLOCK_SIZE)
    cache = CacheManager(num_blocks, BLOCK_SIZE, root=b"r", what_if=what_if)
    found = sum(run(cache, prompt) for prompt in prompts)
    curve = what_if.curve()
    assert [point.num_blocks for point in curve] == [num_blocks // 2, num_blocks, 2 * num_blocks, 4 * num_blocks]
    assert curve[1].num_hit_tokens == found > 0
    for point in curve:
        other = CacheManager(point.num_blocks, BLOCK_SIZE, root=b"r")
        assert point.num_hit_tokens == sum(run(other, prompt) for prompt in prompts), point
        assert point.num_queried_tokens == sum(map(len, prompts))
    assert len({point.num_hit_tokens for point in curve}) > 1


def zipf_prompts(num_prompts: int) -> list[list[BlockHash]]:
    """Stems by Zipf's law, each prompt with a tail of its own."""
    draw = random.Random(1)
    stems = [[name(f"stem {stem} {index}") for index in range(draw.randrange(4, 60))] for stem in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(stems))]
    prompts = []
    for number, stem in enumerate(draw.choices(stems, weights, k=num_prompts)):
        prompts.append(stem + [name(f"tail {number} {index}") for index in range(draw.randrange(12))])
    return prompts


def curve_of(prompts: list[list[BlockHash]], num_blocks: int, share: float) -> list[float]:
    what_if = WhatIf(num_blocks, BLOCK_SIZE, share=share)
    for hashes in prompts:
        what_if.query(hashes, len(hashes) * BLOCK_SIZE + 1, len(hashes))
        what_if.use(hashes)
    return [point.hit_rate for point in what_if.curve()]


@pytest.mark.parametrize(("num_blocks", "share"), [(1000, 0.5), (3000, 0.5), (3000, 0.25)])
def test_a_share_of_the_blocks_gives_the_curve_within_two_points(num_blocks: int, share: float) -> None:
    prompts = zipf_prompts(3000)
    exact, sampled = curve_of(prompts, num_blocks, 1.0), curve_of(prompts, num_blocks, share)
    assert exact == sorted(exact) and exact[3] - exact[0] > 0.1
    assert sampled != exact
    assert all(abs(one - other) < 0.02 for one, other in zip(exact, sampled, strict=True)), (exact, sampled)


def test_memory_is_bounded_whatever_the_pool_and_the_traffic() -> None:
    what_if = WhatIf(1_000_000, BLOCK_SIZE)
    assert 0.032 < what_if.share < 0.033
    small = WhatIf(32_768, BLOCK_SIZE)
    assert small.share == 1.0
    most = 0
    for number in range(1500):
        hashes = [name(f"{number} {index}") for index in range(128)]
        small.query(hashes, 129 * BLOCK_SIZE, 128)
        small.use(hashes)
        most = max(most, len(small._last_use))
    assert MAX_LISTED_BLOCKS - 128 <= most <= MAX_LISTED_BLOCKS + 128
    assert sum(map(len, small._blocks.values())) <= 2 * most


def test_a_conversation_leaves_no_used_up_lists_behind() -> None:
    what_if = WhatIf(1000, BLOCK_SIZE)
    hashes = [name(str(index)) for index in range(300)]
    for turn in range(1, 300):
        what_if.query(hashes[:turn], turn * BLOCK_SIZE + 1, turn)
        what_if.use(hashes[:turn])
    assert len(what_if._last_use) == sum(map(len, what_if._blocks.values())) == 299
    assert what_if.curve()[0].num_hit_tokens == sum(range(299)) * BLOCK_SIZE


def test_of_lists_that_are_mostly_used_up_the_rest_is_kept() -> None:
    what_if = WhatIf(8000, BLOCK_SIZE)
    for number in range(50):
        hashes = [name(f"{number} {index}") for index in range(100)]
        what_if.use(hashes)
        what_if.use(hashes[:99])
    assert len(what_if._last_use) == sum(map(len, what_if._blocks.values())) == 5000


def test_a_prompt_of_full_blocks_only_finds_all_but_the_last() -> None:
    cache = CacheManager(20, BLOCK_SIZE, what_if=WhatIf(20, BLOCK_SIZE))
    prompt = [1] * 4 * BLOCK_SIZE
    assert [run(cache, prompt), run(cache, prompt)] == [0, 3 * BLOCK_SIZE]
    assert cache.finder.what_if is not None
    assert {point.num_hit_tokens for point in cache.finder.what_if.curve()} == {3 * BLOCK_SIZE}


def test_the_scheduler_counts_each_request_once_and_those_that_bypass_the_cache_not_at_all() -> None:
    cache = CacheManager(5, BLOCK_SIZE, what_if=WhatIf(5, BLOCK_SIZE))
    scheduler = Scheduler(cache, max_num_batched_tokens=64)
    scheduler.add(Request("a", [1] * 6, SamplingParams(max_tokens=8)))
    scheduler.add(Request("b", [2] * 9, SamplingParams(max_tokens=4)))
    scheduler.add(Request("c", [3] * 6, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        sampled = {each.request_id: SampledToken(9) for each in plan.scheduled if each.sample}  # type: ignore[arg-type]
        scheduler.update(plan, StepResult(sampled))
    stats = scheduler.stats()
    assert stats.counters.num_preemptions > 0
    assert stats.counters.num_bypassed_tokens == 6
    assert [point.num_queried_tokens for point in stats.what_if] == [15] * 4 == [stats.counters.num_queried_tokens] * 4


def test_a_reset_empties_every_pool_and_keeps_the_counts() -> None:
    cache = CacheManager(20, BLOCK_SIZE, what_if=WhatIf(20, BLOCK_SIZE))
    prompt = [1] * 17
    assert [run(cache, prompt), run(cache, prompt)] == [0, 16]
    assert cache.reset()
    assert run(cache, prompt) == 0
    assert cache.finder.what_if is not None
    assert [(point.num_queried_tokens, point.num_hit_tokens) for point in cache.finder.what_if.curve()] == [
        (51, 16)
    ] * 4


def test_after_a_reset_the_curve_begins_with_empty_pools() -> None:
    draw = random.Random(5)
    prompts = [walk(draw, 9) for _ in range(300)]
    what_if = WhatIf(24, BLOCK_SIZE)
    caches = [CacheManager(24, BLOCK_SIZE, what_if=what_if), *(CacheManager(size, BLOCK_SIZE) for size in (12, 48, 96))]
    found = [0, 0, 0, 0]
    for number, prompt in enumerate(prompts):
        for place, cache in enumerate(caches):
            found[place] += run(cache, prompt)
            if number % 60 == 59:
                assert cache.reset()
    assert [point.num_hit_tokens for point in what_if.curve()] == [found[1], found[0], *found[2:]]


def test_what_was_generated_can_be_found() -> None:
    world = World(20, BLOCK_SIZE)
    world.add("a", [1] * 6, max_tokens=11)
    world.run()
    world.add("b", [*world.requests["a"].tokens.tolist(), 5])
    world.run()
    stats = world.scheduler.stats()
    assert stats.counters.num_hit_tokens == 16
    assert [point.num_hit_tokens for point in stats.what_if] == [16] * 4


def test_no_curve_is_kept_unless_asked_for() -> None:
    assert Scheduler(CacheManager(4, 2)).stats().what_if == ()


@pytest.mark.parametrize("hashes", [["x", "x", "x"], ["x", "y", "x"], ["y", "y", "x", "y"]])
def test_two_contents_with_one_hash_cost_exactness_and_nothing_else(hashes: list[str]) -> None:
    what_if = WhatIf(6, BLOCK_SIZE)
    draw = random.Random(3)
    for number in range(300):
        chain = [name(text) for text in hashes[: draw.randrange(5)]] + [name(f"{number % 7} {i}") for i in range(3)]
        what_if.query(chain, len(chain) * BLOCK_SIZE + 1, len(chain))
        what_if.use(chain[: draw.randrange(len(chain) + 1)])
    assert all(0 <= point.num_hit_tokens <= point.num_queried_tokens for point in what_if.curve())
    assert len(what_if._last_use) < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": ()}, "scales must be positive and ascending"),
        ({"scales": (2, 1)}, "scales must be positive and ascending"),
        ({"scales": (0, 1)}, "scales must be positive and ascending"),
        ({"share": 0.0}, r"share must be in \(0, 1\]"),
        ({"share": 1.5}, r"share must be in \(0, 1\]"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WhatIf(10, BLOCK_SIZE, **options)  # type: ignore[arg-type]
