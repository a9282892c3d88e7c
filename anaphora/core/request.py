"""One request as the control plane sees it: its tokens, its counters, its state. No policy.

cached <= computed <= tokens:

0 ........ num_cached ........ num_computed ............ num_tokens
[ hit at first admission )[ computed by us )[ known, to be computed )
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from anaphora.core.hashing import BlockChain, ExtraKey, pack_tokens
from anaphora.core.ids import RequestId, TokenId
from anaphora.core.plan import FeatureSpan
from anaphora.errors import EmptyPromptError, InvalidTokenError
from anaphora.sampling_params import SamplingParams


class RequestState(Enum):
    WAITING = auto()  # in the queue, also after a preemption
    LOOKING_UP = auto()  # it is its turn: what it can reuse is sought, and its blocks are taken; within a call only
    FOLLOWING = auto()  # waits for a running request that computes the same beginning
    RUNNING = auto()  # holds blocks
    FINISHED = auto()


class Request:
    """A prompt, what has been generated, and how far the K/V are.

    num_cached_tokens: the hit at first admission; never changes after. num_computed_tokens: tokens whose K/V are in the
    pool now. furthest_computed: the most that it ever was, so that what is computed again after a preemption is told
    apart. adapter: digest of its LoRA adapter, which is among the extra_keys, too. chain is None where prefix caching
    is off. epoch: what had been forgotten when the chain was made (core.scopes). on_state: told of every state as it is
    entered, by whoever has a clock; it must not call back. tenant: whose pins its own count among; None has no limit of
    its own.
    Raises EmptyPromptError, InvalidTokenError.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "chain",
        "eos_token_ids",
        "epoch",
        "extra_keys",
        "features",
        "finish_reason",
        "furthest_computed",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_planned_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_staged_blocks",
        "on_state",
        "priority",
        "request_id",
        "sampling",
        "seed",
        "state",
        "stop_reason",
        "tenant",
        "tokens",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int = 0,
        priority: int = 0,
        extra_keys: Iterable[ExtraKey] = (),
        adapter: str | None = None,
        features: tuple[FeatureSpan, ...] = (),
        eos_token_ids: frozenset[int] = frozenset(),
        on_state: Callable[[RequestState], None] | None = None,
        tenant: str | None = None,
    ) -> None:
        if not len(prompt_token_ids):
            raise EmptyPromptError("the prompt has no tokens; give at least one")
        if not isinstance(prompt_token_ids, array):
            if isinstance(prompt_token_ids, str | bytes | bytearray):
                given = type(prompt_token_ids).__name__
                raise InvalidTokenError(f"token ids must be a sequence of integers, got {given}")
            if bool in set(map(type, prompt_token_ids)):
                raise InvalidTokenError("token ids must be integers: True and False only equal some")
        try:
            self.tokens: array[int] = pack_tokens(prompt_token_ids)
        except (TypeError, OverflowError) as error:
            raise InvalidTokenError(f"token ids must be integers in [0, 2**32): {error}") from None
        self.request_id = RequestId(request_id)
        self.sampling = sampling
        self.seed = seed
        self.priority = priority
        self.extra_keys = tuple(extra_keys)
        self.adapter = adapter
        self.features = features
        self.eos_token_ids = frozenset() if sampling.ignore_eos else eos_token_ids
        self.num_prompt_tokens = len(self.tokens)
        self.chain: BlockChain | None = None
        self.epoch = 0
        self.state = RequestState.WAITING
        self.on_state = on_state
        self.tenant = tenant
        self.arrival = 0
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.furthest_computed = 0
        self.num_preemptions = 0
        self.was_admitted = False
        self.num_staged_blocks = 0  # leading blocks of the table that are pending or committed
        self.num_planned_blocks = 0  # leading blocks of the table that the executor knows
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's end tokens, unless ignored, and the request's own stop tokens."""
        return self.eos_token_ids.union(self.sampling.stop_token_ids)

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and not all of the prompt was computed yet."""
        return self.sampling.prompt_logprobs is not None and self.furthest_computed < self.num_prompt_tokens

    @property
    def pools_every_position(self) -> bool:
        """Whether an embedding of all hidden states of the prompt is wanted."""
        return self.sampling.pooling is not None and self.sampling.pooling.needs_every_position

    @property
    def bypasses_cache(self) -> bool:
        """Whether it must not use what others have computed, as it needs more of each position than K/V."""
        return self.is_scoring or self.pools_every_position

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :].tolist()

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def enter(self, state: RequestState) -> None:
        """The scheduler moves it on."""
        self.state = state
        if self.on_state is not None:
            self.on_state(state)

    def append(self, token_id: TokenId) -> None:
        """One more known token; its K/V come in a later step."""
        self.tokens.append(token_id)
        if self.chain is not None:
            self.chain.extend(self.tokens)
