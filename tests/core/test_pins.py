"""Pins: what asks to stay goes later, never never; a beginning stays a beginning; nobody holds more than its limit."""

from __future__ import annotations

import pytest
from test_policies import World

from anaphora.core import CacheManager, Request, check_cache
from anaphora.core.eviction import POLICIES
from anaphora.core.eviction.pinned import PinLimits
from anaphora.errors import ConfigError, InvalidParameterError
from anaphora.sampling_params import SamplingParams

BLOCK_SIZE = 2
NO_LIMIT = PinLimits(1.0, 1.0)


def make_cache(num_blocks: int, limits: PinLimits = NO_LIMIT, policy: str = "lru") -> CacheManager:
    return CacheManager(num_blocks, BLOCK_SIZE, root=b"r", eviction_policy=policy, pin_limits=limits)


def run(cache: CacheManager, tokens: list[int], *, tenant: str | None = None, **pin: float) -> int:
    """One request from beginning to end; returns its hit tokens."""
    request = Request("r", tokens, SamplingParams(max_tokens=1, **pin), tenant=tenant)  # type: ignore[arg-type]
    cache.register(request)
    hit = cache.look_up(request)
    assert cache.admit(request, hit)
    cache.commit(cache.stage(request, request.num_tokens))
    cache.free(request)
    check_cache(cache)
    return hit.num_tokens


def letters(letter: int, num_blocks: int) -> list[int]:
    """A prompt of so many full blocks and one token more."""
    return [letter] * (num_blocks * BLOCK_SIZE + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_prompt_outlives_any_sweep_under_every_policy(policy: str) -> None:
    cache = make_cache(10, policy=policy)
    run(cache, letters(1, 4), cache_priority=1)
    for letter in range(2, 30):
        run(cache, letters(letter, 4))
    assert run(cache, letters(1, 4)) == 8


def test_pins_never_keep_an_allocation_from_its_room_and_the_tail_goes_first() -> None:
    cache = make_cache(6)
    run(cache, letters(1, 5), cache_priority=9)  # blocks 1 to 5; block 6 is blank again
    assert cache.pool.pins.num_pinned == 5
    assert run(cache, letters(2, 2)) == 0  # takes 6, then 5 and 4
    assert cache.pool.pins.num_pinned == 3
    assert run(cache, letters(1, 3)) == 6
    assert run(cache, letters(3, 5)) == 0
    assert cache.pool.pins.num_pinned == 0


def test_unpinned_blocks_go_first_then_level_by_level_each_tail_first() -> None:
    cache = make_cache(8)
    run(cache, letters(1, 2), cache_priority=2)  # blocks 1, 2 (and 3, blank again)
    run(cache, letters(2, 2), cache_priority=1)  # 3, 4
    run(cache, letters(3, 2))  # 5, 6
    assert list(cache.pool.free_queue) == [7, 8, 6, 5, 4, 3, 2, 1]


def test_a_pin_ends_when_its_time_is_over_and_its_blocks_count_as_just_released() -> None:
    cache = make_cache(8)
    cache.pass_time(100.0)
    run(cache, letters(1, 2), pin_ttl_s=10.0)  # blocks 1, 2 until 110 s
    run(cache, letters(2, 2))  # 3, 4
    cache.pass_time(109.9)
    assert list(cache.pool.free_queue) == [5, 6, 7, 8, 4, 3, 2, 1]
    assert cache.pool.pins.num_pinned == 2
    cache.pass_time(110.0)
    assert cache.pool.pins.num_pinned == 0
    run(cache, letters(3, 2))  # 5, 6
    assert list(cache.pool.free_queue) == [7, 8, 4, 3, 2, 1, 6, 5]
    check_cache(cache)


def test_a_pin_that_ends_while_a_request_holds_its_blocks_has_ended() -> None:
    cache = make_cache(8)
    run(cache, letters(1, 2), pin_ttl_s=10.0)
    request = Request("r", letters(1, 2), SamplingParams(max_tokens=1))
    cache.register(request)
    assert cache.admit(request, cache.look_up(request))
    cache.pass_time(10.0)
    cache.free(request)
    run(cache, letters(2, 2), pin_ttl_s=10.0)
    assert cache.pool.pins.num_pinned == 2
    assert list(cache.pool.free_queue.cached)[:2] == [2, 1]
    check_cache(cache)


def test_of_two_pins_the_higher_priority_and_the_later_end_hold() -> None:
    cache = make_cache(12)
    run(cache, letters(1, 2), cache_priority=2, pin_ttl_s=5.0)
    run(cache, letters(1, 3), cache_priority=1, pin_ttl_s=50.0)
    run(cache, letters(2, 2), cache_priority=1, pin_ttl_s=50.0)
    cache.pass_time(20.0)
    assert cache.pool.pins.num_pinned == 5
    assert list(cache.pool.free_queue.cached) == [3, 5, 4, 2, 1]  # level 1, then level 2
    cache.pass_time(50.0)
    assert cache.pool.pins.num_pinned == 0


def test_without_a_time_a_pin_lasts_five_minutes_and_a_time_alone_is_priority_one() -> None:
    assert SamplingParams(cache_priority=3).pin == (3, 300.0)
    assert SamplingParams(pin_ttl_s=7).pin == (1, 7.0)
    assert SamplingParams().pin is None


def test_beyond_the_limit_a_beginning_of_the_prompt_is_pinned() -> None:
    cache = make_cache(10, PinLimits(0.5, 1.0))
    run(cache, letters(1, 8), cache_priority=1)
    assert cache.pool.pins.num_pinned == 5
    for letter in range(2, 20):
        run(cache, letters(letter, 4))
    assert run(cache, letters(1, 8)) == 10


def test_one_tenant_cannot_pin_more_than_its_share_whatever_it_asks_for() -> None:
    cache = make_cache(16, PinLimits(0.5, 0.25))
    for letter in range(1, 4):
        run(cache, letters(letter, 4), tenant="greedy", cache_priority=9, pin_ttl_s=86_400)
    assert cache.pool.pins.num_pinned == 4
    run(cache, letters(9, 3), tenant="modest", cache_priority=1)
    assert cache.pool.pins.num_pinned == 7
    for letter in range(20, 40):
        run(cache, letters(letter, 4), tenant="greedy")
    assert run(cache, letters(9, 3)) == 6
    cache.pass_time(300.0)  # the modest one's end: its share is free again
    run(cache, letters(50, 8), tenant="modest", cache_priority=1)
    assert cache.pool.pins.num_pinned == 8


def test_outputs_are_not_pinned() -> None:
    cache = make_cache(8)
    request = Request("r", [1] * 5, SamplingParams(max_tokens=9, cache_priority=1))
    cache.register(request)
    cache.admit(request, cache.look_up(request))
    for token in range(4):
        request.append(token)  # type: ignore[arg-type]
    cache.grow(request, 9)
    cache.commit(cache.stage(request, 9))
    cache.free(request)
    assert (cache.pool.pins.num_pinned, cache.pool.free_queue.num_cached) == (2, 4)


def test_a_copy_takes_the_pin_over() -> None:
    cache = make_cache(8)
    run(cache, [1] * 4, cache_priority=1)  # blocks 1 and 2
    assert run(cache, [1] * 4) == 2  # block 2 is computed again, into block 3, and the latest copy stays
    assert list(cache.pool.free_queue.cached) == [3, 1]
    assert cache.pool.pins.num_pinned == 2
    run(cache, letters(2, 2))
    assert list(cache.pool.free_queue.cached)[-2:] == [3, 1]


def test_a_reset_ends_every_pin() -> None:
    cache = make_cache(8)
    run(cache, letters(1, 4), tenant="t", cache_priority=1)
    assert cache.reset()
    assert (cache.pool.pins.num_pinned, cache.pool.free_queue.num_cached) == (0, 0)
    check_cache(cache)
    run(cache, letters(2, 4), tenant="t", cache_priority=1)
    assert cache.pool.pins.num_pinned == 4


def test_another_model_ends_every_pin_and_may_use_all_of_the_limit() -> None:
    cache = make_cache(8, PinLimits(0.5, 0.5))
    run(cache, letters(1, 4), tenant="t", cache_priority=9)
    cache.replace_root(b"another")
    assert (cache.pool.pins.num_pinned, cache.pool.free_queue.num_cached) == (0, 4)
    check_cache(cache)
    run(cache, letters(1, 4), tenant="t", cache_priority=1)
    assert cache.pool.pins.num_pinned == 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_every_equation_holds_and_children_go_first_with_pins_at_random(policy: str, seed: int) -> None:
    world = World(policy, num_blocks=24, seed=seed, pinning=True)
    most = 0
    for number in range(250):
        world.cache.pass_time(float(number))
        world.step()
        check_cache(world.cache)
        most = max(most, world.cache.pool.pins.num_pinned)
    assert most == 12
    assert world.cache.pool.num_evicted > 50


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_priority": 10}, r"cache_priority must be an integer in \[0, 9\]; 0 is no pin, got 10"),
        ({"cache_priority": -1}, r"cache_priority must be an integer in \[0, 9\]"),
        ({"cache_priority": True}, r"cache_priority must be an integer"),
        ({"pin_ttl_s": 0}, r"pin_ttl_s must be in \(0, 86400\] seconds, or None, got 0"),
        ({"pin_ttl_s": 86_401}, r"pin_ttl_s must be in \(0, 86400\]"),
        ({"pin_ttl_s": float("nan")}, r"pin_ttl_s must be a finite number"),
        ({"pin_ttl_s": "5"}, r"pin_ttl_s must be a finite number"),
    ],
)
def test_a_wrong_pin_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "half"])
def test_a_wrong_limit_is_refused(share: object) -> None:
    with pytest.raises(ConfigError, match=r"max_pinned_share must be a number in \[0, 1\]"):
        PinLimits(max_pinned_share=share)  # type: ignore[arg-type]
