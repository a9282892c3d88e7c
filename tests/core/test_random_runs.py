"""Many short random runs in tight pools, where everything happens at once; the world checks every read and equation.

Shorter and far more of them than in test_state_machine.py. ANAPHORA_HYPOTHESIS=thorough runs more.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from random import Random

from colliding_hashes import constant, one_bit, parent_blind
from core_world import World

from anaphora.core.eviction import POLICIES
from anaphora.core.hashing import HashFunction

NUM_RUNS = 20_000 if os.environ.get("ANAPHORA_HYPOTHESIS") == "thorough" else 300


def alternate(tokens: Sequence[int]) -> int:
    """Outputs are made of the prompts' letters."""
    return len(tokens) % 2


def tight_world(random: Random, hash_function: HashFunction) -> World:
    return World(
        random.randint(3, 9),
        random.choice([1, 1, 2, 3]),
        budget=random.choice([2, 4, 8, 16]),
        max_num_seqs=random.randint(1, 6),
        policy=random.choice(["fcfs", "priority"]),
        hash_function=hash_function,
        eviction_policy=random.choice(sorted(POLICIES)),
        threshold=random.choice([None, 1, 2, 3]),
        choose=alternate,
    )


def random_prompt(random: Random) -> list[int]:
    """Mostly beginnings of one sequence."""
    tokens = [(position + 1) % 2 for position in range(random.randint(1, 7))]
    if random.random() < 0.3:
        tokens[random.randrange(len(tokens))] = 1
    return tokens


def failing(random: Random, world: World) -> set[str]:
    assert world.in_flight is not None
    names = [scheduled.request_id for scheduled in world.in_flight.scheduled]
    return set(random.sample(names, random.randint(0, 1))) if random.random() < 0.2 else set()


def run(seed: int, hash_function: HashFunction) -> None:
    random = Random(seed)
    world = tight_world(random, hash_function)
    for number in range(random.randint(5, 30)):
        if random.random() < 0.45:
            tokens = random_prompt(random)
            if len(tokens) <= world.cache.capacity_tokens:
                salt = random.choice([None, None, None, "s"])
                max_tokens, priority = random.randint(1, 5), random.randint(0, 2)
                world.add(f"r{number}", tokens, max_tokens, salt=salt, priority=priority)
            continue
        if random.random() < 0.03:
            world.reset(random.random() < 0.5)
        live = [name for name, request in world.requests.items() if not request.is_finished]
        if live and random.random() < 0.1:
            world.finish(random.choice(live))
        if not world.scheduler.has_unfinished:
            continue
        assert world.schedule() is not None
        live = [name for name, request in world.requests.items() if not request.is_finished]
        if random.random() < 0.05:
            world.finish(random.choice(live))
        if random.random() < 0.04:
            world.fail()
        else:
            world.update(failing(random, world))
        probe, salt = random_prompt(random), random.choice([None, "s"])
        found, allowed = world.look_up(probe, salt), world.findable.longest(salt, probe)
        assert found == allowed if hash_function is hashlib.sha256 else found <= allowed
    world.run()
    assert world.scheduler.stats().gauges.num_live_blocks == 0


def run_many(hash_function: HashFunction, num_runs: int = NUM_RUNS) -> None:
    for seed in range(num_runs):
        try:
            run(seed, hash_function)
        except AssertionError as error:
            raise AssertionError(f"run({seed}, ...): {error}") from error


def test_random_runs() -> None:
    run_many(hashlib.sha256)


def test_random_runs_with_two_hashes_for_everything() -> None:
    run_many(one_bit)


def test_random_runs_with_one_hash_for_everything() -> None:
    run_many(constant)


def test_random_runs_with_a_hash_that_ignores_the_parent() -> None:
    run_many(parent_blind)
