"""One request after the other through the real cache manager: look up, admit, stage, commit, grow, free. No clock.

What a pool of a given size can reuse at best when requests do not overlap. Knows traces and the cache manager's verbs;
must not know how blocks are kept or evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anaphora.core.cache_manager import CacheManager
from anaphora.core.eviction import PolicyFactory
from anaphora.core.request import Request
from anaphora.sampling_params import SamplingParams
from anaphora.sim.chain import TraceChain, replayed_requests
from anaphora.sim.trace import Trace

Progress = Callable[[int], None]
"""Told how many more requests are done."""

_PROGRESS_EVERY = 256


@dataclass(frozen=True, slots=True)
class SequentialResult:
    """Tokens and blocks of one replay.

    num_prompt_tokens: of the requests that ran; hit + computed. num_refused: requests larger than the pool, which an
    engine refuses; they are not in any other figure. num_cut: outputs that the pool could not hold to their end.
    num_blocks_looked_up: full prompt blocks of the requests that ran.
    num_evicted_blocks: cached blocks that gave way.
    """

    num_requests: int
    num_refused: int
    num_cut: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_blocks_looked_up: int
    num_evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        """In [0, 1]; 0 without requests."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_hit_tokens


class _LengthOnlyRequest(Request):
    """A request whose tokens nobody reads: its length is all that the cache manager asks for besides the chain."""

    __slots__ = ("num_tokens",)

    num_tokens: int  # in the place of a property that counts tokens

    def __init__(self) -> None:
        super().__init__("replayed", [0], SamplingParams(max_tokens=1))


def replay_sequential(
    trace: Trace,
    num_blocks: int,
    block_size: int,
    policy: str | PolicyFactory = "lru",
    *,
    with_outputs: bool = False,
    hits: list[int] | None = None,
    progress: Progress = lambda done: None,
) -> SequentialResult:
    """Replay a whole trace.

    with_outputs: a request also computes and commits its output, as in the engine, until the pool can hold no more of
        it; later prompts hit what the trace has ids for. Without, it has its prompt only, the partial last block
        included.
    hits: if given, the hit tokens of each request are appended; -1 for a refused one.
    Raises ConfigError.
    """
    trace.check_block_size(block_size)
    # No chain is the same object twice, so no trail would ever be walked on.
    cache = CacheManager(num_blocks, block_size, eviction_policy=policy, min_trail_blocks=num_blocks + 1)
    capacity = cache.capacity_tokens
    request = _LengthOnlyRequest()
    num_refused = num_cut = num_prompt_tokens = num_hit_tokens = num_looked_up = 0
    for number, replayed in enumerate(replayed_requests(trace, block_size, with_outputs=with_outputs), start=1):
        if number % _PROGRESS_EVERY == 0:
            progress(_PROGRESS_EVERY)
        length, num_known, block_ids = replayed
        if length > capacity:
            num_refused += 1
            if hits is not None:
                hits.append(-1)
            continue
        request.num_tokens = length
        request.chain = TraceChain(block_ids, block_size)
        hit = cache.look_up(request)
        cache.admit(request, hit)
        cache.commit(cache.stage(request, length))
        if num_known > length:
            if num_known > capacity:
                num_known = capacity
                num_cut += 1
            cache.grow(request, num_known)
            cache.commit(cache.stage(request, num_known))
        cache.free(request)
        num_prompt_tokens += length
        num_hit_tokens += hit.num_tokens
        num_looked_up += length // block_size
        if hits is not None:
            hits.append(hit.num_tokens)
    progress(len(trace.requests) % _PROGRESS_EVERY)
    return SequentialResult(
        num_requests=len(trace.requests) - num_refused,
        num_refused=num_refused,
        num_cut=num_cut,
        num_prompt_tokens=num_prompt_tokens,
        num_hit_tokens=num_hit_tokens,
        num_blocks_looked_up=num_looked_up,
        num_evicted_blocks=cache.pool.num_evicted,
    )


def unbounded_blocks(trace: Trace, block_size: int, *, with_outputs: bool = False) -> int:
    """A pool that never evicts, whatever runs: every distinct block, and the largest request beside them."""
    num_blocks = trace.num_distinct_blocks(block_size, with_outputs=with_outputs)
    if with_outputs:  # what was generated without ids stays too
        num_blocks += sum(
            request.known_length // block_size - len(trace.known_block_ids(request, block_size))
            for request in trace.requests
        )
    return max(1, num_blocks + trace.max_request_blocks(block_size))
