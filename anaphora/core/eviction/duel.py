"""Whether a policy earns its keep: its hits against those of LRU on the same traffic, which a list of names tells.

    names     [ least recently released ............ most recently released )    as many as the policy holds blocks:
                                                                                 LRU's pool, without the pool

Who falls behind by more than a margin rests, and LRU's order rules; each rest is twice as long as the one before, and
half as long after a win, so that being wrong costs ever less. Knows names and counts; must not know policies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat

from anaphora.core.ids import BlockHash

_MARGIN = 0.003  # of the blocks that were used
_KEEP = 0.8  # of what was counted, from one judgement to the next
_FIRST_REST = 2  # judgements


class Duel:
    """`judge` is called at even intervals, about two for each pool's worth of released blocks."""

    def __init__(self) -> None:
        self._names: OrderedDict[BlockHash, None] = OrderedDict()
        self._num_used = 0.0
        self._lead = 0.0  # blocks that the policy found and LRU did not, less those that only LRU found
        self._resting = 0
        self._next_rest = _FIRST_REST

    def release(self, names: Sequence[BlockHash], num_found: int, room: int) -> None:
        """Blocks of a chain, head first, are released; the policy had found num_found of them, and now holds `room`."""
        known = self._names
        num_known = list(map(known.pop, names, repeat(0))).count(None)
        known.update(dict.fromkeys(reversed(names)))
        for _ in range(len(known) - room):
            known.popitem(last=False)
        self._num_used += len(names)
        self._lead += num_found - num_known

    def judge(self) -> bool:
        """Whether the policy rules until the next judgement."""
        if self._resting:
            self._resting -= 1
            if not self._resting:
                self._num_used = self._lead = 0.0
            return not self._resting
        if self._lead < -_MARGIN * self._num_used:
            self._resting = self._next_rest
            self._next_rest *= 2
            return False
        if self._lead > 0:
            self._next_rest = max(_FIRST_REST, self._next_rest // 2)
        self._num_used *= _KEEP
        self._lead *= _KEEP
        return True
