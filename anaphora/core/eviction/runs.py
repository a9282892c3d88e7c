"""Cached free blocks as *runs*: blocks that follow each other in a chain, released together, worth the same.

    released     [ head ........ tail )     one call of `put`, cut into runs where the worth of its blocks changes,
    runs         [ 0    )[ 1   )[ 2   )     and behind a block at which an older run hangs
    found again  ==>                        takes a beginning away: what is left of a run is its tail
    evicted                        <==      from the tail of a *leaf*: a run at whose last block no run hangs

Whoever uses a block uses its parents, so blocks join and leave by runs: a run costs some steps of Python, a block a few
passes at C speed. Knows lineages; must not know what a run is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from anaphora.core.ids import BlockId, Lineage
from anaphora.core.prefix_index import PrefixIndex


class Run:
    """blocks: head first. kind, uses, tick: equal for all of them. is_leaf: kept by whoever orders the leaves."""

    __slots__ = ("blocks", "is_leaf", "kind", "tick", "uses")

    def __init__(self, blocks: list[BlockId], kind: int, uses: int, tick: int) -> None:
        self.blocks = blocks
        self.kind = kind
        self.uses = uses
        self.tick = tick
        self.is_leaf = False


class Runs:
    """Every run, and which of them are leaves. on_leaf, on_hidden: a run has become a leaf, or is none any more."""

    def __init__(self, index: PrefixIndex, on_leaf: Callable[[Run], None], on_hidden: Callable[[Run], None]) -> None:
        self._lineages, self._parents = index.lineages, index.parents
        self._on_leaf, self._on_hidden = on_leaf, on_hidden
        self._run_of: list[Run | None] = [None] * len(index.hashes)  # out of date where a block is in no run
        self._by_tail: dict[Lineage, Run] = {}
        self._hanging: dict[Lineage, int] = {}  # runs whose head's parent this is, whether that is here or not
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[BlockId]:
        return (block for run in self._by_tail.values() for block in run.blocks)

    def cuts(self, chain: list[BlockId]) -> list[int]:
        """Where a chain, head first, must be cut: behind blocks at which runs hang, and where it has a gap."""
        lineages, hanging = [self._lineages[block] for block in chain], self._hanging
        cuts = []
        if not hanging.keys().isdisjoint(lineages):
            cuts = [place for place, lineage in enumerate(lineages[:-1], start=1) if lineage in hanging]
        parents = [self._parents[block] for block in chain]
        if parents[1:] != lineages[:-1]:
            cuts += [place for place in range(1, len(chain)) if parents[place] != lineages[place - 1]]
        return cuts

    def add(self, run: Run) -> None:
        """Children come before their parents."""
        run_of = self._run_of
        for block in run.blocks:
            run_of[block] = run
        self._num_blocks += len(run.blocks)
        self._by_tail[self._lineages[run.blocks[-1]]] = run
        self._hang(self._parents[run.blocks[0]])
        if self._lineages[run.blocks[-1]] not in self._hanging:
            self._on_leaf(run)

    def take_beginning(self, blocks: Sequence[BlockId]) -> tuple[Run, int]:
        """Take as many of these blocks, parents first, as begin one run; returns it and how many. The first is here."""
        run = self._run_of[blocks[0]]
        assert run is not None, "somebody found a block that no policy holds"
        if run.blocks[0] != blocks[0]:  # a copy of its parent was found instead of the parent
            run = self._split(run, run.blocks.index(blocks[0]))
        count = min(len(run.blocks), len(blocks))
        if run.blocks[:count] != blocks[:count]:
            count = next(place for place in range(count) if run.blocks[place] != blocks[place])
        parent = self._parents[run.blocks[0]]
        self._num_blocks -= count
        if count == len(run.blocks):
            self._drop(run)
        else:
            del run.blocks[:count]
            self._hang(self._parents[run.blocks[0]])
        self._unhang(parent)
        return run, count

    def take_tail(self, run: Run, count: int) -> list[BlockId]:
        """The last `count` blocks of a leaf, tail first. There are as many."""
        self._num_blocks -= count
        if count == len(run.blocks):
            self._drop(run)
            self._unhang(self._parents[run.blocks[0]])
            return run.blocks[::-1]
        blocks = run.blocks[: -count - 1 : -1]
        del self._by_tail[self._lineages[blocks[0]]]
        del run.blocks[-count:]
        self._by_tail[self._lineages[run.blocks[-1]]] = run
        return blocks

    def _split(self, run: Run, place: int) -> Run:
        """Blocks from `place` on stay this run; those before become one of their own, at which it hangs."""
        upper = Run(run.blocks[:place], run.kind, run.uses, run.tick)
        parent = self._parents[run.blocks[0]]
        del run.blocks[:place]
        self._hang(self._parents[run.blocks[0]])
        self._num_blocks -= place
        self.add(upper)
        self._unhang(parent)
        return run

    def _drop(self, run: Run) -> None:
        del self._by_tail[self._lineages[run.blocks[-1]]]
        if run.is_leaf:
            self._on_hidden(run)

    def _hang(self, parent: Lineage) -> None:
        self._hanging[parent] = self._hanging.get(parent, 0) + 1
        run = self._by_tail.get(parent)
        if run is not None and run.is_leaf:
            self._on_hidden(run)

    def _unhang(self, parent: Lineage) -> None:
        left = self._hanging[parent] - 1
        if left:
            self._hanging[parent] = left
            return
        del self._hanging[parent]
        run = self._by_tail.get(parent)
        if run is not None:
            self._on_leaf(run)
