"""The contract of every eviction policy: each block once, a child before its parent, the same calls the same order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from anaphora.core import CacheManager, Request, check_cache
from anaphora.core.eviction import POLICIES, policy_factory
from anaphora.core.ids import BlockId
from anaphora.errors import ConfigError
from anaphora.sampling_params import SamplingParams

BLOCK_SIZE = 2
PARAMS = SamplingParams(max_tokens=1)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class World:
    """A cache with a few prompts that walk down one tree, admitted and freed at random, at most three at a time."""

    def __init__(self, policy: str, num_blocks: int, seed: int, pinning: bool = False) -> None:
        self.cache = CacheManager(num_blocks, BLOCK_SIZE, root=b"r", eviction_policy=policy)
        self.draw = random.Random(seed)
        self.pinning = pinning
        self.live: list[Request] = []
        self.log: list[list[BlockId]] = []
        self.num_hit_tokens = 0
        self.on_take: Callable[[list[BlockId]], None] = lambda blocks: None
        policy_object = self.cache.pool.free_queue.cached
        take = policy_object.take

        def observed_take(count: int) -> list[BlockId]:
            parents, lineages = self.cache.pool.index.parents, self.cache.pool.index.lineages
            blocks = take(count)
            assert len(blocks) == count == len(set(blocks))
            left = {parents[block] for block in policy_object}
            for place, block in enumerate(blocks):
                later = {parents[other] for other in blocks[place + 1 :]}
                assert lineages[block] not in left | later, "a parent went before its child"
            self.log.append(blocks)
            return blocks

        policy_object.take = observed_take  # type: ignore[method-assign]

    def step(self) -> None:
        if self.live and (len(self.live) == 3 or self.draw.random() < 0.5):
            self.cache.free(self.live.pop(self.draw.randrange(len(self.live))))
            return
        tokens = [self.draw.choice((0, 0, 0, 1, 2)) for _ in range(self.draw.randrange(1, 16))]
        params = PARAMS
        if self.pinning:
            ttl_s = self.draw.choice((None, None, 2, 10, 60))
            params = replace(params, pin_ttl_s=ttl_s, cache_priority=0 if ttl_s is None else self.draw.randrange(1, 4))
        request = Request("r", tokens, params)
        request.request_id = f"r{len(self.log)}-{self.draw.random()}"  # type: ignore[assignment]
        self.cache.register(request)
        hit = self.cache.look_up(request)
        if self.cache.admit(request, hit):
            self.num_hit_tokens += hit.num_tokens
            self.cache.commit(self.cache.stage(request, request.num_tokens))
            self.live.append(request)


@pytest.mark.parametrize("seed", range(8))
def test_every_equation_of_the_cache_holds_and_children_go_first(policy: str, seed: int) -> None:
    world = World(policy, num_blocks=24, seed=seed)
    for _ in range(250):
        world.step()
        check_cache(world.cache)
    assert world.num_hit_tokens > 0
    assert world.cache.pool.num_evicted == sum(map(len, world.log)) > 50


def test_the_same_calls_give_the_same_order(policy: str) -> None:
    logs = []
    for _ in range(2):
        world = World(policy, num_blocks=24, seed=3)
        for _ in range(400):
            world.step()
        logs.append(world.log)
    assert logs[0] == logs[1]


def test_everything_comes_out_once_and_children_first(policy: str) -> None:
    world = World(policy, num_blocks=64, seed=5)
    for _ in range(100):
        world.step()
    for request in world.live:
        world.cache.free(request)
    pool = world.cache.pool
    cached = pool.free_queue.cached
    expected = sorted(cached)
    assert len(expected) == len(cached) > 10
    blocks = cached.pop_all()
    place = {pool.index.lineages[block]: number for number, block in enumerate(blocks)}
    assert sorted(blocks) == expected
    assert len(cached) == 0
    assert list(cached) == []
    for number, block in enumerate(blocks):
        assert place.get(pool.index.parents[block], len(blocks)) > number


def test_a_reset_leaves_a_policy_that_works(policy: str) -> None:
    world = World(policy, num_blocks=24, seed=6)
    for _ in range(100):
        world.step()
    while world.live:
        world.cache.free(world.live.pop())
    assert world.cache.reset()
    assert world.cache.pool.free_queue.num_cached == 0
    for _ in range(100):
        world.step()
        check_cache(world.cache)


def test_a_pool_of_one_block(policy: str) -> None:
    world = World(policy, num_blocks=1, seed=7)
    for _ in range(100):
        world.step()
        check_cache(world.cache)


def run(cache: CacheManager, *tokens: int) -> int:
    """One request from beginning to end; returns its hit tokens."""
    request = Request("r", tokens, PARAMS)
    cache.register(request)
    hit = cache.look_up(request)
    assert cache.admit(request, hit)
    cache.commit(cache.stage(request, request.num_tokens))
    cache.free(request)
    return hit.num_tokens


@pytest.mark.parametrize("name", ["lfu", "lru-2", "s3-fifo", "cost-aware"])
def test_what_was_used_often_outlives_a_sweep_of_new_prompts(name: str) -> None:
    cache = CacheManager(8, BLOCK_SIZE, root=b"r", eviction_policy=name)
    for _ in range(4):
        run(cache, 1, 1, 2, 2, 3)
    for token in range(10, 13):
        run(cache, *[token] * 5)
    assert run(cache, 1, 1, 2, 2, 3) == 4


def test_lru_forgets_it() -> None:
    cache = CacheManager(8, BLOCK_SIZE, root=b"r")
    for _ in range(4):
        run(cache, 1, 1, 2, 2, 3)
    for token in range(10, 14):
        run(cache, *[token] * 5)
    assert run(cache, 1, 1, 2, 2, 3) == 0


def test_the_learnt_policy_learns_that_one_kind_of_block_never_comes_back() -> None:
    """Ten prompts return in turn, between them three times as many that never do: LRU hits nothing."""
    hits = dict.fromkeys(("lru", "learnt-hazard"), 0)
    for name in hits:
        cache = CacheManager(100, BLOCK_SIZE, root=b"r", eviction_policy=name)
        for turn in range(4000):
            prompt = [turn // 4 % 10 + 1 if turn % 4 == 0 else 1000 + turn] * 9
            hit = run(cache, *prompt)
            hits[name] += hit if turn >= 2000 else 0
    assert hits["lru"] == 0
    assert hits["learnt-hazard"] > 0.8 * 500 * 8


def test_an_unknown_policy_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"one of lru, .*, got 'fifo'"):
        policy_factory("fifo")
    assert next(iter(POLICIES)) == "lru"
