"""The learnt policy's parts: runs, what is remembered, the index, and the duel with LRU that bounds its losses."""

from __future__ import annotations

import random

import pytest
from core_world import make_chain

from anaphora.core import CacheManager, Request, check_cache
from anaphora.core.eviction.duel import Duel
from anaphora.core.eviction.hazard_table import _WIDTHS, NUM_AGES, HazardTable, _gittins
from anaphora.core.eviction.learnt_hazard import LearntHazard
from anaphora.core.ids import BlockHash, BlockId
from anaphora.core.prefix_index import PrefixIndex
from anaphora.sampling_params import SamplingParams

BLOCK_SIZE = 2


def run(cache: CacheManager, tokens: list[int]) -> int:
    """One request from beginning to end; returns its hit tokens."""
    request = Request("r", tokens, SamplingParams(max_tokens=1))
    cache.register(request)
    hit = cache.look_up(request)
    assert cache.admit(request, hit)
    cache.commit(cache.stage(request, request.num_tokens))
    cache.free(request)
    return hit.num_tokens


def prompt(*letters: int) -> list[int]:
    """A block for each letter, and one token more."""
    return [letter for letter in letters for _ in range(BLOCK_SIZE)] + [0]


def make_cache(num_blocks: int) -> CacheManager:
    return CacheManager(num_blocks, BLOCK_SIZE, root=b"r", eviction_policy="learnt-hazard")


def test_before_anything_is_learnt_the_oldest_run_goes_tail_first_and_whole() -> None:
    cache = make_cache(12)
    run(cache, prompt(1, 2, 3))  # blocks 1 to 3; 4 is blank again
    run(cache, prompt(1, 2, 7, 8))  # hits 1 and 2: 3 is left; takes 4, 5
    policy = cache.pool.pins.policy
    assert sorted(policy) == [1, 2, 3, 4, 5]
    assert policy.take(1) == [3]
    assert policy.take(2) == [5, 4]  # 2 is a leaf only now
    assert policy.take(2) == [2, 1]


def test_a_block_is_no_leaf_while_another_run_hangs_at_it() -> None:
    cache = make_cache(20)
    run(cache, prompt(1, 2, 3, 4))  # 1 to 4
    run(cache, prompt(1, 2))  # 1 and 2 are released again; 3, 4 hang at 2
    policy = cache.pool.pins.policy
    assert policy.take(4) == [4, 3, 2, 1]


def chain_of_four() -> LearntHazard:
    """A policy over an index in which blocks 1 to 4 hold one chain; none of them is free."""
    index = PrefixIndex(5)
    chain = make_chain([1, 2, 3, 4], block_size=1)
    blocks = [BlockId(block) for block in (1, 2, 3, 4)]
    index.stage(blocks, chain, 0, None)
    index.commit(blocks)
    return LearntHazard(index)


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_a_copy_that_goes_from_the_middle_of_a_run_leaves_two_runs() -> None:
    policy = chain_of_four()
    policy.put(ids(4, 3, 2, 1), 3)
    policy.discard(BlockId(2))
    assert sorted(policy) == [1, 3, 4]
    policy.remove(ids(1))
    assert sorted(policy) == [3, 4]
    policy.put(ids(2, 1), 1)
    assert policy.take(4) == [4, 3, 2, 1]


def test_a_block_that_comes_late_still_goes_before_its_parent() -> None:
    policy = chain_of_four()
    policy.put(ids(4, 2, 1), 3)
    policy.put(ids(3), 2)
    assert policy.take(4) == [4, 3, 2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_runs_hold_whatever_is_found_copied_or_evicted_in_them(seed: int) -> None:
    draw = random.Random(seed)
    cache = make_cache(30)
    live: list[Request] = []
    for number in range(600):
        if live and (len(live) == 4 or draw.random() < 0.5):
            cache.free(live.pop(draw.randrange(len(live))))
        else:
            tokens = prompt(*(draw.choice((1, 1, 1, 2)) for _ in range(draw.randrange(1, 9))))
            request = Request(f"r{number}", tokens[: draw.choice((-1, len(tokens)))], SamplingParams(max_tokens=1))
            cache.register(request)
            if cache.admit(request, cache.look_up(request)):
                live.append(request)
                cache.commit(cache.stage(request, request.num_tokens))
        check_cache(cache)
    assert cache.pool.num_evicted > 100


def test_memory_of_the_evicted_is_bounded() -> None:
    cache = make_cache(20)
    policy = cache.pool.pins.policy
    assert isinstance(policy, LearntHazard)
    most = 0
    for letter in range(1, 500):
        run(cache, prompt(letter, letter, letter))
        most = max(most, len(policy._newer) + len(policy._older))
    assert 4 * 20 < most <= 8 * 21


def brute_force_index(hazards: list[float], age: int) -> float:
    best = gain = time = 0.0
    left = 1.0
    for later in range(age, NUM_AGES):
        reused = left * hazards[later]
        time += _WIDTHS[later] * (left - reused / 2)
        gain += reused
        left -= reused
        best = max(best, gain / time)
    return best


def test_the_index_is_the_best_ratio_over_every_time_to_stop() -> None:
    draw = random.Random(2)
    for _ in range(100):
        hazards = [draw.random() ** draw.choice((1, 3, 8)) * 0.9 for _ in range(NUM_AGES)]
        expected = [brute_force_index(hazards, age) for age in range(NUM_AGES)]
        assert _gittins(hazards) == pytest.approx(expected, rel=1e-9)


def test_a_class_that_comes_back_soon_is_worth_more_than_one_that_does_not() -> None:
    table = HazardTable(2, decay=1.0)
    for born in range(20):
        table.begin(0, born, 10)
        table.begin(1, born, 10)
        table.reuse(0, born, born + 2, 8)
        table.lose(1, born, born + 200, 10)
    indices = table.indices(300)
    assert indices[2] > 0.2 > 0.05 > indices[NUM_AGES + 2]


def names(*texts: str) -> list[BlockHash]:
    return [BlockHash(text.encode()) for text in texts]


def test_a_policy_that_finds_less_than_lru_rests_ever_longer_until_it_wins() -> None:
    duel = Duel()
    judgements = []
    for _ in range(35):
        duel.release(names("a", "b"), num_found=0, room=2)  # LRU finds both, but for the first time
        judgements.append(duel.judge())
    rests = "".join("x" if judgement else "." for judgement in judgements)
    assert [len(rest) for rest in rests.split("x") if rest] == [2, 4, 8, 16]


def test_a_policy_that_finds_as_much_as_lru_never_rests() -> None:
    duel = Duel()
    for number in range(100):
        duel.release(names("a", "b"), num_found=2 * (number > 0), room=2)
        assert duel.judge()


def test_lru_has_as_much_room_as_the_policy_and_its_tail_goes_first() -> None:
    duel = Duel()
    duel.release(names("a", "b", "c"), num_found=0, room=2)  # c is gone
    duel.release(names("a", "b", "c"), num_found=2, room=2)
    assert duel.judge()
    duel.release(names("a"), num_found=0, room=2)
    assert not duel.judge()


def test_it_never_falls_far_behind_where_lru_is_right() -> None:
    """Chats that come back at once or never; what was used most is what is over."""
    draw = random.Random(1)
    hits = {}
    turns = [(session, turn) for session in range(2500) for turn in range(1, 6)]
    turns.sort(key=lambda entry: entry[0] + entry[1] * 5 + 4 * draw.random())
    for policy in ("lru", "learnt-hazard"):
        cache = CacheManager(200, BLOCK_SIZE, root=b"r", eviction_policy=policy)
        hits[policy] = sum(run(cache, prompt(*[session + 1] * (turn * 2))) for session, turn in turns)
    total = sum(turn * 2 * BLOCK_SIZE + 1 for _, turn in turns)
    assert hits["lru"] > 0.2 * total
    assert hits["learnt-hazard"] > hits["lru"] - 0.002 * total


def test_an_empty_policy_is_empty() -> None:
    policy = LearntHazard(PrefixIndex(5))
    assert (len(policy), list(policy), policy.take(0), policy.pop_all()) == (0, [], [], [])
