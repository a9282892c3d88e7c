"""Many short random runs over random layouts: windows, chunks, full attention and recurrent state, in tight pools.

The world checks every read of every group, every loaded state and every equation; see test_random_runs for one group.
ANAPHORA_HYPOTHESIS=thorough runs more.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from random import Random

from colliding_hashes import constant, one_bit
from core_world import World

from anaphora.core import AttentionKind, CacheLayout, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.core.eviction import POLICIES
from anaphora.core.hashing import HashFunction

NUM_RUNS = 20_000 if os.environ.get("ANAPHORA_HYPOTHESIS") == "thorough" else 200


def random_layout(random: Random) -> CacheLayout:
    sides: list[AttentionKind] = [
        SlidingWindow(random.randint(1, 12)) if random.random() < 0.6 else ChunkedAttention(random.randint(1, 12))
        for _ in range(random.randint(0, 3))
    ]
    has_state = random.random() < 0.4
    spine: list[AttentionKind] = [FullAttention()] if random.random() < 0.6 or not (sides or has_state) else []
    return CacheLayout((*spine, *sides), has_state)


def letters(tokens: Sequence[int]) -> int:
    """Outputs are made of the prompts' letters."""
    return (len(tokens) // 3 + tokens[0]) % 2


def random_world(random: Random, hash_function: HashFunction) -> World:
    return World(
        random.randint(6, 24),
        random.choice([1, 2, 2, 3, 4]),
        budget=random.choice([2, 4, 8, 16]),
        max_num_seqs=random.randint(1, 6),
        policy=random.choice(["fcfs", "priority"]),
        caching=random.random() < 0.95,
        hash_function=hash_function,
        eviction_policy=random.choice(sorted(POLICIES)),
        threshold=random.choice([None, 1, 2, 3, 6]),
        choose=letters,
        layout=random_layout(random),
        num_state_slots=random.choice([0, 1, 2, 3, 8]),
        state_checkpoint_interval=random.choice([1, 4, 6, 16]),
    )


def random_prompt(random: Random) -> list[int]:
    """Mostly beginnings of one sequence."""
    tokens = [(position // 3) % 2 for position in range(random.randint(1, 30))]
    if random.random() < 0.4:
        tokens[random.randrange(len(tokens))] ^= 1
    return tokens


def failing(random: Random, world: World) -> set[str]:
    assert world.in_flight is not None
    names = [scheduled.request_id for scheduled in world.in_flight.scheduled]
    return set(random.sample(names, random.randint(0, 1))) if random.random() < 0.2 else set()


def alone(prompt: Sequence[int], max_tokens: int, capacity: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, capacity + 1):
        tokens.append(letters(tokens))
    return tokens[len(prompt) :]


def run(seed: int, hash_function: HashFunction) -> None:
    random = Random(seed)
    world = random_world(random, hash_function)
    capacity = world.cache.capacity_tokens
    for number in range(random.randint(5, 30)):
        if random.random() < 0.45:
            tokens = random_prompt(random)
            if len(tokens) <= capacity:
                salt = random.choice([None, None, None, "s"])
                max_tokens, priority = random.choice([1, 2, 5, 20]), random.randint(0, 2)
                scoring = random.random() < 0.1
                world.add(f"r{number}", tokens, max_tokens, salt=salt, priority=priority, scoring=scoring)
            continue
        if random.random() < 0.03:
            world.reset(random.random() < 0.5)
        live = [name for name, request in world.requests.items() if not request.is_finished]
        if live and random.random() < 0.1:
            world.finish(random.choice(live))
        for _ in range(random.randint(1, 4)):
            if not world.scheduler.has_unfinished:
                break
            assert world.schedule() is not None, "there is work, and nobody works"
            live = [name for name, request in world.requests.items() if not request.is_finished]
            if random.random() < 0.05:
                world.finish(random.choice(live))
            if random.random() < 0.04:
                world.fail()
            else:
                world.update(failing(random, world))
        probe, salt = random_prompt(random), random.choice([None, "s"])
        assert world.look_up(probe, salt) <= world.findable.longest(salt, probe)
    world.run()
    gauges = world.scheduler.stats().gauges
    assert gauges.num_live_blocks == world.cache.spine.num_live == 0
    assert world.scheduler.stats().gauges.num_checkpoints <= gauges.num_state_slots
    for request in world.requests.values():
        if request.finish_reason == "length":
            expected = alone(request.prompt_token_ids, request.sampling.max_tokens, capacity)
            assert request.output_token_ids == expected


def run_many(hash_function: HashFunction, num_runs: int = NUM_RUNS) -> None:
    for seed in range(num_runs):
        try:
            run(seed, hash_function)
        except Exception as error:
            raise AssertionError(f"run({seed}, ...): {error!r}") from error


def test_random_layouts() -> None:
    run_many(hashlib.sha256)


def test_random_layouts_with_two_hashes_for_everything() -> None:
    run_many(one_bit)


def test_random_layouts_with_one_hash_for_everything() -> None:
    run_many(constant)
