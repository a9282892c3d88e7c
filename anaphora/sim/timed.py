"""A trace played through the real scheduler at its own arrival times, on a virtual clock.

    arrival ............ admitted ................ first token        time to first token = queue + wait + compute
    [ queue            )[ wait and compute       ]

queue: no room, a step in flight, or another request computes the same beginning. compute: what the steps from admission
to the first token would take with this request alone in them. wait: the rest of these steps, spent on others.

Knows the scheduler, the executor's seam and the clock that it moves itself; must not read a real one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from anaphora.core.cache_manager import CacheManager
from anaphora.core.eviction import PolicyFactory
from anaphora.core.plan import StepPlan
from anaphora.core.request import Request
from anaphora.core.scheduler import RequestUpdate, Scheduler
from anaphora.core.staged import Staged
from anaphora.core.stats import Counters
from anaphora.errors import ConfigError, PromptTooLongError
from anaphora.sampling_params import SamplingParams
from anaphora.sim.chain import TraceChain
from anaphora.sim.cost_model import CostModel
from anaphora.sim.executor import SimulatedExecutor
from anaphora.sim.trace import Trace

MIN_ARRIVAL_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class TimedOptions:
    """max_num_batched_tokens, max_num_seqs: as in EngineConfig. arrival_scale: arrival times are multiplied by it,
    so 2 halves the load. Raises ConfigError."""

    cost_model: CostModel = field(default_factory=CostModel)
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    arrival_scale: float = 1.0

    def __post_init__(self) -> None:
        if not MIN_ARRIVAL_SCALE <= self.arrival_scale < float("inf"):
            raise ConfigError(f"arrival_scale must be a number > 0, got {self.arrival_scale!r}")


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the virtual clock, from the beginning of the trace; compute_s is a duration. See the module."""

    arrival_s: float
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    compute_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        return self.admitted_s - self.arrival_s

    @property
    def wait_s(self) -> float:
        return self.first_token_s - self.admitted_s - self.compute_s


@dataclass(frozen=True, slots=True)
class TimedResult:
    """times: one entry a request that ran, in order of arrival. counters: the scheduler's own.

    num_refused: prompts larger than the pool. num_cut: outputs that ended early, as the pool could hold no more.
    """

    times: Sequence[RequestTimes]
    counters: Counters
    num_refused: int
    num_cut: int
    duration_s: float


class _TraceCacheManager(CacheManager):
    """Gives a request the chain of its trace entry instead of hashing its tokens."""

    def __init__(self, num_blocks: int, block_size: int, policy: str | PolicyFactory) -> None:
        super().__init__(num_blocks, block_size, eviction_policy=policy)
        self.next_block_ids: list[int] = []

    def register(self, request: Request) -> None:
        request.chain = TraceChain(self.next_block_ids, self.block_size)

    def stage(self, request: Request, num_computed_tokens: int) -> Staged:
        """Blocks of generated text have no ids: they are never findable."""
        assert request.chain is not None, "register gave it one"
        return super().stage(request, min(num_computed_tokens, len(request.chain.hashes) * self.block_size))


class _Replay:
    """One run: the clock and what is known of the requests under way."""

    def __init__(self, trace: Trace, cache: _TraceCacheManager, options: TimedOptions) -> None:
        self.trace = trace
        self.cache = cache
        self.scheduler = Scheduler(
            cache, max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs
        )
        self.cost_model = options.cost_model
        self.executor = SimulatedExecutor(options.cost_model)
        self.arrival_scale = options.arrival_scale
        self.now_s = 0.0
        self.times: dict[str, RequestTimes] = {}
        self.waiting_for_admission: set[str] = set()
        self.before_first_token: set[str] = set()
        self.num_arrived = 0
        self.num_refused = 0
        self.num_cut = 0

    def arrival_s(self, number: int) -> float:
        return self.trace.requests[number].timestamp_ms / 1000 * self.arrival_scale

    def let_arrive(self) -> int:
        """Queue every request whose time has come; returns how many."""
        first = self.num_arrived
        while self.num_arrived < len(self.trace.requests) and self.arrival_s(self.num_arrived) <= self.now_s:
            number = self.num_arrived
            self.num_arrived += 1
            traced = self.trace.requests[number]
            params = SamplingParams(max_tokens=max(1, traced.output_length), ignore_eos=True)
            request = Request(str(number), array("I", bytes(4 * traced.input_length)), params)
            self.cache.next_block_ids = self.trace.block_ids(traced, self.cache.block_size)
            try:
                self.scheduler.add(request)
            except PromptTooLongError:
                self.num_refused += 1
                continue
            self.times[request.request_id] = RequestTimes(self.arrival_s(number))
            self.waiting_for_admission.add(request.request_id)
        return self.num_arrived - first

    def step(self) -> bool:
        """One step, if a request can run. False if none can before something arrives."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self._note_admissions(plan)
        result = self.executor.execute(plan)
        self.now_s += result.compute_s
        for scheduled in plan.scheduled:
            if scheduled.request_id in self.before_first_token:
                alone_s = self.cost_model.overhead_s + self.cost_model.request_s(scheduled)
                self.times[scheduled.request_id].compute_s += alone_s
        for update in self.scheduler.update(plan, result):
            self._note(update)
        return True

    def _note_admissions(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            if admission.request_id in self.waiting_for_admission:  # the first time, not after a preemption
                self.waiting_for_admission.discard(admission.request_id)
                self.before_first_token.add(admission.request_id)
                self.times[admission.request_id].admitted_s = self.now_s

    def _note(self, update: RequestUpdate) -> None:
        times = self.times[update.request.request_id]
        if update.token is not None and update.request.num_output_tokens == 1:
            times.first_token_s = self.now_s
            self.before_first_token.discard(update.request.request_id)
        if update.finish_reason is not None:
            times.finished_s = self.now_s
            self.num_cut += update.request.num_output_tokens < update.request.sampling.max_tokens


def replay_timed(
    trace: Trace,
    num_blocks: int,
    block_size: int,
    policy: str | PolicyFactory = "lru",
    options: TimedOptions | None = None,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> TimedResult:
    """Replay a whole trace. Outputs have the trace's lengths and are never shared: generated text has no ids.

    Raises ConfigError.
    """
    trace.check_block_size(block_size)
    replay = _Replay(trace, _TraceCacheManager(num_blocks, block_size, policy), options or TimedOptions())
    while replay.num_arrived < len(trace.requests) or replay.scheduler.has_unfinished:
        progress(replay.let_arrive())
        if not replay.step() and (replay.num_arrived < len(trace.requests) or replay.scheduler.has_unfinished):
            assert replay.num_arrived < len(trace.requests), "requests wait and none can run: a bug in the scheduler"
            replay.now_s = max(replay.now_s, replay.arrival_s(replay.num_arrived))
    return TimedResult(
        tuple(replay.times.values()),
        replay.scheduler.stats().counters,
        replay.num_refused,
        replay.num_cut,
        replay.now_s,
    )
