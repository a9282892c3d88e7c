"""Least recently released first. A request releases its tail first, so a child goes before its parent by itself.

    released     [ h ........ t )      a *batch*: the blocks of one call of `put`; batches stand oldest first
    found again  ==>                   takes a beginning away, which costs a comparison of two lists
    evicted               <==          takes the tail of the oldest batch

So blocks come and go by batches, at C speed. Who leaves from elsewhere (a copy of its parent was found, or a copy of
itself is released) stays as an entry to be *passed over*: a block comes back behind all that it left, so a count for
each block says how many of its entries, from the oldest on, those are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from anaphora.core.common_length import common_length
from anaphora.core.ids import BlockId
from anaphora.core.prefix_index import PrefixIndex

_SLACK = 64


class LRU:
    """One queue. Every call is O(1) a block, amortised: what is left behind is never much more than what is here."""

    def __init__(self, index: PrefixIndex) -> None:
        self._batches: deque[list[BlockId]] = deque()
        self._by_head: dict[BlockId, list[BlockId]] = {}  # who begins two of them is known by the later one
        self._passed_over: Counter[BlockId] = Counter()
        self._num_left_behind = 0  # entries to be passed over, and batches that are empty
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[BlockId]:
        passed_over = self._passed_over.copy()
        for batch in self._batches:
            yield from _present(batch[::-1], passed_over)

    def put(self, blocks: Sequence[BlockId], depth: int) -> None:
        batch = list(reversed(blocks))
        self._batches.append(batch)
        self._by_head[batch[0]] = batch
        self._num_blocks += len(batch)

    def remove(self, blocks: Sequence[BlockId]) -> None:
        done = 0
        while done < len(blocks):
            batch = self._by_head.pop(blocks[done], None)
            if batch is None:
                self._passed_over[blocks[done]] += 1
                self._num_left_behind += 1
                done += 1
            else:
                done += self._take_beginning(batch, blocks[done:] if done else blocks)
        self._num_blocks -= len(blocks)
        if self._num_left_behind > self._num_blocks + _SLACK:
            self._tidy()

    def _take_beginning(self, batch: list[BlockId], blocks: Sequence[BlockId]) -> int:
        """Take as many of these blocks as a batch begins with; returns how many."""
        count = min(len(batch), len(blocks))
        if batch[:count] != blocks[:count]:
            count = common_length(batch, blocks, 0)
        del batch[:count]
        if not batch:
            self._num_left_behind += 1
        else:
            self._by_head[batch[0]] = batch
        return count

    def discard(self, block: BlockId) -> None:
        self.remove([block])

    def _tidy(self) -> None:
        batches = [_present(batch[::-1], self._passed_over)[::-1] for batch in self._batches]
        self._batches = deque(filter(None, batches))
        self._by_head = {batch[0]: batch for batch in self._batches}
        self._num_left_behind = 0

    def take(self, count: int) -> list[BlockId]:
        batches, by_head, passed_over = self._batches, self._by_head, self._passed_over
        taken: list[BlockId] = []
        missing = count
        while missing:
            batch = batches[0]
            if len(batch) > missing:
                entries = batch[: -missing - 1 : -1]
                del batch[-missing:]
            else:
                entries = batch[::-1]
                batches.popleft()
                if not batch:
                    self._num_left_behind -= 1
                else:
                    by_head.pop(batch[0], None)
            if passed_over:
                present = _present(entries, passed_over)
                self._num_left_behind -= len(entries) - len(present)
                entries = present
            taken += entries
            missing -= len(entries)
        self._num_blocks -= count
        return taken

    def pop_all(self) -> list[BlockId]:
        return self.take(self._num_blocks)


def _present(entries: list[BlockId], passed_over: Counter[BlockId]) -> list[BlockId]:
    """The oldest entries without those to be passed over, which are counted off."""
    if passed_over.keys().isdisjoint(entries):
        return entries
    present = []
    for block in entries:
        left = passed_over.get(block)
        if left is None:
            present.append(block)
        elif left == 1:
            del passed_over[block]
        else:
            passed_over[block] = left - 1
    return present
