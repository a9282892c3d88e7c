"""Stand-ins for the engine's surroundings: an executor that is a pure function of the tokens, a tokenizer of bytes, a
clock that moves only when told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from anaphora.core.cache_manager import CacheManager
from anaphora.core.plan import SampledToken, StepPlan, StepResult
from anaphora.core.scheduler import Scheduler
from anaphora.engine.engine import Engine

EOS = 256
VOCAB_SIZE = 257


class ByteTokenizer:
    """One token a byte, and an end token that is special."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([EOS] if add_special_tokens and text.startswith("<bos>") else []) + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        data = b"".join(bytes([i]) if i != EOS else b"" if skip_special_tokens else b"<eos>" for i in token_ids)
        return data.decode(errors="replace")


class FakeExecutor:
    """Writes token ids into slots as if they were K/V, reads them back by block table, and answers from what it read.

    answer: all tokens of a request -> the next one. before: called with each plan first; may raise.
    failed: request ids that fail when they are next scheduled.
    """

    def __init__(self, answer: Callable[[list[int]], int], block_size: int, num_blocks: int) -> None:
        self.vocab_size = VOCAB_SIZE
        self.answer = answer
        self.before: Callable[[StepPlan], None] = lambda plan: None
        self.failed: set[str] = set()
        self.plans: list[StepPlan] = []
        self.seeds: dict[str, int] = {}
        self._block_size = block_size
        self._slots = [-1] * ((num_blocks + 1) * block_size)
        self._tables: dict[str, list[int]] = {}
        self._logprobs: dict[str, int | None] = {}
        self._scored_prompts: dict[str, tuple[int, ...]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for request_id in plan.released:
            self._tables.pop(request_id, None)
        for admission in plan.admitted:
            self._tables[admission.request_id] = []
            self._logprobs[admission.request_id] = admission.sampling.logprobs
            self.seeds[admission.request_id] = admission.seed
            if admission.sampling.prompt_logprobs is not None:
                self._scored_prompts[admission.request_id] = admission.token_ids[: admission.num_prompt_tokens]
        for request in plan.scheduled:
            self._tables[request.request_id] += request.new_block_ids[0]
            for position, token_id in enumerate(request.token_ids, start=request.start):
                self._slots[self._slot(request.request_id, position)] = token_id
        self.before(plan)
        failing = self.failed & {request.request_id for request in plan.scheduled}
        self.failed -= failing
        return StepResult(
            sampled={r.request_id: self._sample(r) for r in plan.scheduled if r.sample and r.request_id not in failing},
            failed=dict.fromkeys(failing, "non-finite logits"),
            compute_s=0.25,
            sample_s=0.125,
            prompt_logprobs={
                r.request_id: self._score(r)
                for r in plan.scheduled
                if r.request_id in self._scored_prompts and r.request_id not in failing
            },
        )

    def _sample(self, request) -> SampledToken:
        stop = request.start + len(request.token_ids)
        token_id = self.answer([self._slots[self._slot(request.request_id, p)] for p in range(stop)])
        top = self._logprobs[request.request_id]
        if top is None:
            return SampledToken(token_id)
        likeliest = (((token_id + 1) % VOCAB_SIZE, -0.5), (token_id, -0.5))[:top]  # a tie, and the chosen one second
        return SampledToken(token_id, logprob=-0.5, rank=1, top_logprobs=likeliest)

    def _score(self, request) -> tuple[SampledToken, ...]:
        """The logprob of a token is minus its position."""
        stop = request.start + len(request.token_ids)
        tokens = self._scored_prompts[request.request_id][request.start + 1 : stop + 1]
        return tuple(
            SampledToken(token, -float(position), rank=position, top_logprobs=((token, -float(position)), (66, -9.0)))
            for position, token in enumerate(tokens, request.start + 1)
        )

    def _slot(self, request_id: str, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return self._tables[request_id][block] * self._block_size + offset


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.tick_s = 0.0  # what passes whenever anybody looks at it

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def scrambled(token_ids: list[int]) -> int:
    """A token that depends on every token before it; never the end token."""
    return hashlib.blake2b(repr(token_ids).encode(), digest_size=1).digest()[0]


def reciting(text: str | bytes) -> Callable[[list[int]], int]:
    """Answers with a text, byte by byte, behind a prompt of 4 tokens; then end tokens."""
    data = text if isinstance(text, bytes) else text.encode()
    return lambda token_ids: data[len(token_ids) - 4] if len(token_ids) - 4 < len(data) else EOS


def make_engine(
    answer: Callable[[list[int]], int] = scrambled,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = 200,
    enable_prefix_caching: bool = True,
    tokenizer: object = ByteTokenizer(),  # it has no state
    policy: str = "fcfs",
    long_prefill_token_threshold: int | None = None,
    seed: int = 0,
) -> tuple[Engine, FakeExecutor, Clock]:
    executor, clock = FakeExecutor(answer, block_size, num_blocks), Clock()
    cache = CacheManager(num_blocks, block_size, root=b"fake", enable_prefix_caching=enable_prefix_caching)
    scheduler = Scheduler(
        cache,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        policy=policy,
        long_prefill_token_threshold=long_prefill_token_threshold,
    )
    engine = Engine(scheduler, executor, clock=clock, tokenizer=tokenizer, eos_token_ids=frozenset({EOS}), seed=seed)
    return engine, executor, clock


def run(engine: Engine) -> tuple[dict[str, object], dict[str, list]]:
    """Step until nothing is left: the outputs by request, and every delta by request."""
    outputs, deltas = {}, {}
    while engine.has_unfinished:
        for step in engine.step():
            deltas.setdefault(step.request_id, []).append(step)
            if step.output is not None:
                assert step.request_id not in outputs
                outputs[step.request_id] = step.output
    return outputs, deltas
