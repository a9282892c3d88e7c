"""How long a hit is: the longest that every group accepts, and in a pool that holds everything the ideal one."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from core_world import World, make_request

from anaphora.core import AttentionKind, BlockPool, CacheLayout, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.core.checkpoints import Checkpoints
from anaphora.core.hit import accepted_hit
from anaphora.core.ids import BlockHash, BlockId, Lineage
from anaphora.core.side_group import SideGroup

BLOCK_SIZE = 4
LAYOUTS: list[tuple[AttentionKind, ...]] = [
    (FullAttention(), SlidingWindow(6)),
    (FullAttention(), SlidingWindow(8), SlidingWindow(8), SlidingWindow(8)),
    (FullAttention(), ChunkedAttention(6)),
    (SlidingWindow(1),),
    (SlidingWindow(5), SlidingWindow(13)),
    (FullAttention(), SlidingWindow(9), ChunkedAttention(16), SlidingWindow(100)),
    (ChunkedAttention(12), SlidingWindow(4)),
]


class Holdings:
    """Side groups that hold some of the blocks of one beginning, and checkpoints after some of them."""

    def __init__(self, random: Random) -> None:
        self.kinds: list[AttentionKind] = [
            random.choice([SlidingWindow, ChunkedAttention])(random.randint(1, 20)) for _ in range(random.randint(1, 3))
        ]
        self.pool = BlockPool(40, num_side_groups=len(self.kinds))
        self.groups = [SideGroup(kind, number, self.pool, BLOCK_SIZE) for number, kind in enumerate(self.kinds)]
        self.lineages = [Lineage(number) for number in range(10, 10 + random.randint(0, 9))]
        self.has = [[random.random() < 0.85 for _ in self.lineages] for _ in self.kinds]
        for number, row in enumerate(self.has):
            for lineage, is_there in zip(self.lineages, row, strict=True):
                if is_there:
                    block = self.pool.allocate_side(number, 1)
                    self.pool.commit_side(number, [lineage], [BlockHash(b"")], block)
        self.states = Checkpoints(9, 1, BLOCK_SIZE) if random.random() < 0.5 else None
        self.kept = {lineage for lineage in self.lineages if random.random() < 0.6}
        if self.states is not None:
            for lineage in self.kept:
                self.states.stage(make_request("r", range(100)), BLOCK_SIZE, lineage)
                self.states.commit(lineage)

    def accepts(self, length: int) -> bool:
        if self.states is not None and length and self.lineages[length - 1] not in self.kept:
            return False
        return all(
            all(row[kind.first_visible(length * BLOCK_SIZE) // BLOCK_SIZE : length])
            for kind, row in zip(self.kinds, self.has, strict=True)
        )


def test_the_hit_is_the_longest_that_every_group_accepts_whatever_they_hold() -> None:
    random = Random(5)
    cut_twice = 0
    for _ in range(1_000):
        held = Holdings(random)
        count = len(held.lineages)
        blocks = [BlockId(1000 + number) for number in range(count)]
        hit = accepted_hit(blocks, count, held.lineages, BLOCK_SIZE, held.groups, held.pool.sides, held.states)
        best = max(length for length in range(count + 1) if held.accepts(length))
        assert (hit.num_tokens, hit.blocks, hit.num_matched) == (best * BLOCK_SIZE, blocks[:best], count)
        assert [len(each) for each in hit.sides] == [
            best - kind.first_visible(best * BLOCK_SIZE) // BLOCK_SIZE for kind in held.kinds
        ]
        cut_twice += best < min(group.longest(held.lineages, count) for group in held.groups)
    assert cut_twice > 20, "no group was ever asked again"


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_in_a_pool_that_holds_everything_no_group_shortens_a_hit(kinds: tuple[AttentionKind, ...]) -> None:
    random = Random(1)
    world = World(140 * len(kinds), BLOCK_SIZE, budget=random.choice([7, 16, 64]), layout=CacheLayout(kinds))
    known: list[list[int]] = []
    for number in range(12):
        base = random.choice(known) if known else []
        prompt = base[: random.randint(0, len(base))] + [random.randrange(1000) for _ in range(random.randint(1, 30))]
        request = world.add(f"r{number}", prompt, max_tokens=random.randint(1, 9))
        ideal = max((common(prompt, each) for each in known), default=0)
        world.run()
        assert request.num_cached_tokens == min(ideal, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        known.append(request.tokens[:-1].tolist())  # the last token's K/V are never computed


def hits_by_divergence(layout: CacheLayout, length: int, interval: int) -> list[int]:
    """The hit of a second prompt that parts from the first one at each position, from 0 on."""
    hits = []
    for cut in range(length + 1):
        world = World(200, BLOCK_SIZE, layout=layout, num_state_slots=50, state_checkpoint_interval=interval)
        world.add("a", range(length))
        world.run()
        b = world.add("b", [*range(cut), *range(500, 500 + length - cut)] if cut < length else range(length))
        world.run()
        hits.append(b.num_cached_tokens)
    return hits


@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_the_hit_never_rises_as_the_divergence_moves_earlier(kinds: tuple[AttentionKind, ...]) -> None:
    assert hits_by_divergence(CacheLayout(kinds), 33, 512) == [cut // BLOCK_SIZE * BLOCK_SIZE for cut in range(33)] + [
        32
    ]


def test_with_a_state_a_second_use_loses_less_than_the_interval_and_a_third_nothing() -> None:
    layout = CacheLayout((FullAttention(), SlidingWindow(6)), has_state=True)
    assert hits_by_divergence(layout, 33, 12) == [cut // 12 * 12 for cut in range(32)] + [32, 32]
    for cut in range(34):
        world = World(200, BLOCK_SIZE, layout=layout, num_state_slots=50, state_checkpoint_interval=12)
        world.add("a", range(33))
        world.run()
        for name, token in (("b", 500), ("c", 700)):
            world.add(name, [*range(cut), *range(token, token + 40 - cut)])
            world.run()
        assert world.requests["c"].num_cached_tokens == min(cut, 32) // BLOCK_SIZE * BLOCK_SIZE
