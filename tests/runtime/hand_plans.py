"""Drives a TorchExecutor with plans written by hand: no scheduler, no pool, block ids as the test wants them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from anaphora.core.ids import BlockId, RequestId, TokenId
from anaphora.core.plan import Admission, ScheduledRequest, StepPlan, StepResult
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.executor import TorchExecutor
from anaphora.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=20)


def make_executor(
    module: PreTrainedModel, *, num_blocks: int = 64, block_size: int = 16, max_num_seqs: int = 4, max_len: int = 512
) -> TorchExecutor:
    return TorchExecutor(
        module,
        inspect_model(module, max_len),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        dtype=module.dtype,
        device="cpu",
    )


def admit(
    name: str, tokens: Sequence[int], sampling: SamplingParams = GREEDY, seed: int = 0, num_prompt: int | None = None
) -> Admission:
    ids = tuple(TokenId(token) for token in tokens)
    return Admission(RequestId(name), ids, len(ids) if num_prompt is None else num_prompt, sampling, seed)


def part(
    name: str, start: int, tokens: Sequence[int], blocks: Sequence[int] = (), sample: bool = True
) -> ScheduledRequest:
    """blocks: new ones of the only group."""
    return grouped_part(name, start, tokens, [blocks], sample)


def grouped_part(
    name: str, start: int, tokens: Sequence[int], blocks: Sequence[Sequence[int]], sample: bool = True
) -> ScheduledRequest:
    """blocks: new ones of each group."""
    ids = tuple(TokenId(token) for token in tokens)
    new_block_ids = tuple(tuple(BlockId(block) for block in group) for group in blocks)
    return ScheduledRequest(RequestId(name), start, ids, new_block_ids, sample)


def step(
    executor: TorchExecutor,
    *scheduled: ScheduledRequest,
    admitted: Sequence[Admission] = (),
    released: Sequence[str] = (),
) -> StepResult:
    return executor.execute(StepPlan(0, tuple(RequestId(r) for r in released), tuple(admitted), scheduled))


def expected_logprobs(module: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """The model's own log-probabilities [vocab] of the token after `tokens`, without any cache."""
    with torch.inference_mode():
        logits = module(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0, -1].float().log_softmax(dim=-1)


def assert_sampled(module: PreTrainedModel, result: StepResult, name: str, tokens: Sequence[int]) -> int:
    """The greedy token of `name` and its 20 likeliest tokens are the model's own after `tokens`. Returns the token."""
    sampled = result.sampled[RequestId(name)]
    logprobs = expected_logprobs(module, tokens)
    assert sampled.token_id == int(logprobs.argmax())
    assert sampled.rank == 1
    assert [token for token, _ in sampled.top_logprobs] == logprobs.topk(20).indices.tolist()
    reported = torch.tensor([logprob for _, logprob in sampled.top_logprobs])
    assert (reported - logprobs.topk(20).values).abs().max() < 1e-5
    assert sampled.logprob == sampled.top_logprobs[0][1]
    return sampled.token_id
