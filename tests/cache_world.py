"""A cache manager without a scheduler: what a request finds, and then computes."""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.core import CacheManager, Request
from anaphora.core.hashing import ExtraKey
from anaphora.sampling_params import SamplingParams

BLOCK_SIZE = 4
TOKENS = list(range(100, 126))  # six full blocks and two tokens
Keys = Sequence[ExtraKey]


class Cache:
    """Requests over one cache manager, one after the other."""

    def __init__(self, root: bytes = b"root", num_blocks: int = 400) -> None:
        self.manager = CacheManager(num_blocks, BLOCK_SIZE, root=root)
        self._num_requests = 0

    def request(self, keys: Keys = (), tokens: Sequence[int] = TOKENS) -> Request:
        self._num_requests += 1
        request = Request(str(self._num_requests), tokens, SamplingParams(max_tokens=1), extra_keys=keys)
        self.manager.register(request)
        return request

    def compute(self, request: Request) -> int:
        """Run a registered request to its end; returns the blocks that it found."""
        hit = self.manager.look_up(request)
        assert self.manager.admit(request, hit)
        self.manager.commit(self.manager.stage(request, request.num_tokens))
        self.manager.free(request)
        return len(hit.blocks)

    def hit(self, keys: Keys = (), tokens: Sequence[int] = TOKENS) -> int:
        """Blocks that a request finds, and changes nothing."""
        return len(self.manager.look_up(self.request(keys, tokens)).blocks)
