"""A few steps that nobody asked for, so that the first request does not pay for what happens once.

Libraries choose and build their kernels for a shape when they first meet it, and memory is given page by page as it is
first touched. Knows plans and an executor; must not know requests, schedulers or counters. Only for an executor that
nobody has used yet: it writes into the pool, and wipes what it wrote.
"""

from __future__ import annotations

import torch

from anaphora.core.ids import BlockId, RequestId, TokenId, cdiv
from anaphora.core.plan import Admission, ScheduledRequest, StepPlan
from anaphora.runtime.executor import TorchExecutor
from anaphora.sampling_params import SamplingParams

MAX_PROMPT_TOKENS = 512
"""More take longer and show nothing new."""
MAX_SHORT_REQUESTS = 7
SHORT_PROMPT_TOKENS = 3

_LONG = SamplingParams(temperature=0.0, seed=0)
_SHORT = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, presence_penalty=0.5, logprobs=1, seed=0)


def warm_up(executor: TorchExecutor, *, max_num_tokens: int, max_num_seqs: int) -> None:
    """Run a long prompt, its next token, several short prompts, and the next token of all.

    max_num_tokens: of one request, and of one step. max_num_seqs: at once. Where the pool is too small for all of it,
    some is left out. Leaves the executor as it was.
    """
    block_size, num_groups = executor.cache.block_size, executor.num_groups
    num_blocks = (executor.cache.num_blocks - 1) // max(1, num_groups)  # each group has a share of its own
    per_short = cdiv(SHORT_PROMPT_TOKENS + 1, block_size)
    num_short = min(MAX_SHORT_REQUESTS, max_num_seqs - 1, (num_blocks - 1) // per_short)
    if max_num_tokens < SHORT_PROMPT_TOKENS * num_short:
        num_short = 0
    room = (num_blocks - num_short * per_short) * block_size - 1  # a token comes after the prompt
    num_long = min(max_num_tokens - 1, MAX_PROMPT_TOKENS, room)
    if num_long < 1:
        return
    first_short = 1 + cdiv(num_long + 1, block_size)
    last = first_short + num_short * per_short
    long = _Warm(executor, "warm-up", num_long, range(1, first_short), num_blocks, _LONG)
    short = [
        _Warm(executor, f"warm-up-{i}", SHORT_PROMPT_TOKENS, range(begin, begin + per_short), num_blocks, _SHORT)
        for i, begin in enumerate(range(first_short, last, per_short))
    ]
    try:
        _run(executor, [long.admission], [long.prompt()])
        _run(executor, [], [long.next_token()])
        if short:
            _run(executor, [one.admission for one in short], [one.prompt() for one in short])
            _run(executor, [], [one.next_token() for one in (long, *short)])
    finally:
        executor.release([one.request_id for one in (long, *short)])
        for group in range(num_groups):
            begin = group * num_blocks * block_size
            executor.cache.wipe(torch.arange(begin + block_size, begin + last * block_size, device=executor.device))


class _Warm:
    """One made-up request. Its tokens are any, as is what comes out. blocks: of the first group; num_blocks: from one
    group's to the next one's.
    """

    def __init__(
        self,
        executor: TorchExecutor,
        name: str,
        num_tokens: int,
        blocks: range,
        num_blocks: int,
        sampling: SamplingParams,
    ) -> None:
        self.request_id = RequestId(name)
        self._tokens = tuple(TokenId(token % executor.vocab_size) for token in range(num_tokens))
        groups = range(executor.num_groups)
        self._blocks = tuple(tuple(BlockId(group * num_blocks + block) for block in blocks) for group in groups)
        self._none: tuple[tuple[BlockId, ...], ...] = ((),) * len(groups)
        self.admission = Admission(self.request_id, self._tokens, num_tokens, sampling, 0)

    def prompt(self) -> ScheduledRequest:
        return ScheduledRequest(self.request_id, 0, self._tokens, self._blocks, sample=True)

    def next_token(self) -> ScheduledRequest:
        """The same place each time: what is there already is written again."""
        return ScheduledRequest(self.request_id, len(self._tokens), self._tokens[:1], self._none, sample=True)


def _run(executor: TorchExecutor, admitted: list[Admission], scheduled: list[ScheduledRequest]) -> None:
    executor.execute(StepPlan(0, (), tuple(admitted), tuple(scheduled)))
