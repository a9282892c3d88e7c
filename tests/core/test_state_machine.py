"""The control plane under any sequence of calls: nobody reads K/V that are not its own beginning, nothing leaks,
nobody starves, and every request gets the tokens that it would have got alone and without a cache.

ANAPHORA_HYPOTHESIS=thorough runs many more and longer sequences.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
from collections.abc import Sequence

import pytest
from colliding_hashes import constant, one_byte
from core_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anaphora.core import CacheLayout, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.core.eviction import POLICIES
from anaphora.core.eviction.pinned import PinLimits
from anaphora.core.hashing import HashFunction
from anaphora.errors import DuplicateRequestError, PromptTooLongError, UnknownRequestError

EOS, STOP = 100, 101
THOROUGH = os.environ.get("ANAPHORA_HYPOTHESIS") == "thorough"
SETTINGS = settings(
    max_examples=3_000 if THOROUGH else 40,
    stateful_step_count=80 if THOROUGH else 40,
    derandomize=not THOROUGH,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


picks = st.integers(0, 1 << 16)
few_picks = st.lists(picks, max_size=3)
# Prompts are drawn as (length, seed) and not token by token: Hypothesis would make almost all of them short.
lengths = st.integers(0, 40)
seeds = st.integers(0, 3)
salts = st.sampled_from([None, None, None, "a", "b"])


@st.composite
def any_layout(draw: st.DrawFn) -> CacheLayout:
    """Up to three side groups, with or without full attention and a recurrent state."""
    side = st.builds(SlidingWindow, st.integers(1, 20)) | st.builds(ChunkedAttention, st.integers(1, 20))
    sides, has_state = draw(st.lists(side, max_size=3)), draw(st.booleans())
    has_full = draw(st.booleans()) or not (sides or has_state)
    return CacheLayout((*([FullAttention()] if has_full else []), *sides), has_state)


class ControlPlane(RuleBasedStateMachine):
    hash_function: HashFunction = hashlib.sha256
    layouts: st.SearchStrategy[CacheLayout] = st.just(CacheLayout())

    @initialize(
        num_blocks=st.one_of(st.integers(3, 12), st.integers(3, 40)),
        block_size=st.one_of(st.integers(1, 4), st.integers(1, 8)),
        budget=st.sampled_from([1, 2, 3, 5, 8, 16, 64]),
        max_num_seqs=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_model_len=st.one_of(st.none(), st.none(), st.integers(2, 60)),
        caching=st.sampled_from([True, True, True, True, False]),
        eviction_policy=st.sampled_from(sorted(POLICIES)),
        threshold=st.sampled_from([None, None, 1, 3, 8]),
        alphabet=st.integers(2, 4),
        pinned_share=st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.0]),
        tenant_share=st.sampled_from([0.1, 0.5, 1.0]),
        data=st.data(),
        num_state_slots=st.integers(0, 6),
        interval=st.integers(1, 24),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        policy: str,
        max_model_len: int | None,
        caching: bool,
        eviction_policy: str,
        threshold: int | None,
        alphabet: int,
        pinned_share: float,
        tenant_share: float,
        data: st.DataObject,
        num_state_slots: int,
        interval: int,
    ) -> None:
        layout = data.draw(type(self).layouts)
        num_blocks = max(num_blocks, len(layout.groups))
        self.alphabet = alphabet
        self.max_model_len = max_model_len
        self.caching = caching
        self.exact = type(self).hash_function is hashlib.sha256 and layout == CacheLayout()
        self.num_added = 0
        self.ended_from_outside: set[str] = set()
        self.clean = True  # nobody was ended from outside or failed
        self.world = World(
            num_blocks,
            block_size,
            budget=budget,
            max_num_seqs=max_num_seqs,
            policy=policy,
            max_model_len=max_model_len,
            caching=caching,
            hash_function=type(self).hash_function,
            eviction_policy=eviction_policy,
            threshold=threshold,
            choose=self.choose,
            pin_limits=PinLimits(pinned_share, tenant_share),
            layout=layout,
            num_state_slots=num_state_slots,
            state_checkpoint_interval=interval,
        )
        self.capacity = self.world.cache.capacity_tokens
        if layout == CacheLayout():
            assert self.capacity == num_blocks * block_size

    def choose(self, tokens: Sequence[int]) -> int:
        """Depends on the exact beginning only. Outputs use the prompts' letters, so that they collide with prompts."""
        number = zlib.crc32(array("I", tokens).tobytes())
        return EOS if number % 29 == 0 else STOP if number % 31 == 0 else number // 64 % self.alphabet

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[str]:
        return [request_id for request_id, request in self.world.requests.items() if not request.is_finished]

    def tokens_like_an_earlier_one(self, base: int, cut: int, length: int, seed: int) -> list[int]:
        """A beginning of an earlier request, its output included, and `length` letters more."""
        earlier = list(self.world.requests.values())
        beginning = earlier[base % len(earlier)].tokens.tolist() if earlier else []
        beginning = [token for token in beginning if token < self.alphabet]
        tokens = beginning[: cut % (len(beginning) + 1)]
        tokens += [zlib.crc32(bytes([seed, position])) // 64 % self.alphabet for position in range(length)]
        return tokens or [0]

    @rule(
        base=picks,
        cut=picks,
        length=lengths,
        seed=seeds,
        max_tokens=st.integers(1, 30),
        salt=salts,
        priority=st.integers(-1, 1),
        ends=st.booleans(),
        min_tokens=st.integers(0, 4),
        scoring=st.booleans(),
        cache_priority=st.sampled_from([0, 0, 1, 2, 9]),
        pin_ttl_s=st.sampled_from([None, 1.0, 4.0, 20.0]),
        tenant=st.sampled_from([None, "s", "t"]),
    )
    def add(
        self,
        base: int,
        cut: int,
        length: int,
        seed: int,
        max_tokens: int,
        salt: str | None,
        priority: int,
        ends: bool,
        min_tokens: int,
        scoring: bool,
        cache_priority: int,
        pin_ttl_s: float | None,
        tenant: str | None,
    ) -> None:
        tokens = self.tokens_like_an_earlier_one(base, cut, length, seed)
        request_id = f"r{self.num_added}"
        self.num_added += 1
        too_long = len(tokens) > self.capacity or (self.max_model_len is not None and len(tokens) >= self.max_model_len)
        if too_long:
            before = self.world.snapshot()
            with pytest.raises(PromptTooLongError):
                self.world.add(request_id, tokens, max_tokens)
            assert self.world.snapshot() == before
            return
        self.world.add(
            request_id,
            tokens,
            max_tokens,
            salt=salt,
            priority=priority,
            eos=frozenset({EOS}) if ends else frozenset(),
            stop=(STOP,) if ends else (),
            min_tokens=min(min_tokens, max_tokens),
            scoring=scoring,
            cache_priority=cache_priority,
            pin_ttl_s=pin_ttl_s if cache_priority else None,
            tenant=tenant,
        )
        with pytest.raises(DuplicateRequestError):
            self.world.add(request_id, tokens)

    @rule(
        base=picks,
        cut=picks,
        length=lengths,
        seed=seeds,
        own_lengths=st.lists(st.integers(0, 12), min_size=2, max_size=5),
        max_tokens=st.integers(1, 30),
        scorer=st.integers(0, 9),
    )
    def add_many_alike(
        self, base: int, cut: int, length: int, seed: int, own_lengths: list[int], max_tokens: int, scorer: int
    ) -> None:
        """Several at once that share a beginning: leaders and followers, pending blocks, duplicates.

        scorer: which of them wants logprobs of its prompt, if there is one of that number.
        """
        for own_seed, own_length in enumerate(own_lengths):
            shared = self.tokens_like_an_earlier_one(base, cut, length, seed)
            own = [zlib.crc32(bytes([own_seed, 99, position])) % self.alphabet for position in range(own_length)]
            tokens = (shared + own)[: self.capacity]
            if self.max_model_len is not None:
                tokens = tokens[: self.max_model_len - 1]
            self.world.add(f"r{self.num_added}", tokens, max_tokens, scoring=own_seed == scorer)
            self.num_added += 1

    @precondition(lambda self: self.live)
    @rule(pick=picks, reason=st.sampled_from(["abort", "stop"]))
    def finish(self, pick: int, reason: str) -> None:
        request_id = self.live[pick % len(self.live)]
        self.ended_from_outside.add(request_id)
        self.clean = False
        self.world.finish(request_id, reason)
        if self.world.in_flight is None:
            with pytest.raises(UnknownRequestError):
                self.world.finish(request_id, reason)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.in_flight is None)
    @rule()
    def schedule(self) -> None:
        plan = self.world.schedule()
        assert (plan is None) == (not self.live), "there is work, and nobody works"

    @precondition(lambda self: self.world.in_flight is not None)
    @rule()
    def update(self) -> None:
        self.world.update()

    @precondition(lambda self: self.world.in_flight is not None)
    @rule(picks=few_picks)
    def update_with_failures(self, picks: list[int]) -> None:
        scheduled = self.world.in_flight.scheduled
        self.clean = self.clean and not picks
        self.world.update({scheduled[pick % len(scheduled)].request_id for pick in picks})

    @precondition(lambda self: self.world.in_flight is not None)
    @rule()
    def fail(self) -> None:
        self.clean = False
        self.world.fail()

    @rule(num_steps=st.integers(1, 4))
    def steps(self, num_steps: int) -> None:
        if self.world.in_flight is not None:
            self.world.update()
        for _ in range(num_steps):
            self.schedule()
            if self.world.in_flight is None:
                return
            self.world.update()

    # -- the cache -----------------------------------------------------------------------------------------------------

    @rule(preempt=st.booleans())
    def reset(self, preempt: bool) -> None:
        stats = self.world.scheduler.stats()
        done = self.world.reset(preempt)
        assert done == (self.world.in_flight is None and (preempt or stats.gauges.num_running == 0))
        if done:
            gauges = self.world.scheduler.stats().gauges
            assert gauges.num_blank_blocks == gauges.num_total_blocks

    @rule(base=picks, cut=picks, length=st.integers(0, 6), seed=seeds, salt=salts)
    def look_up(self, base: int, cut: int, length: int, seed: int, salt: str | None) -> None:
        tokens = self.tokens_like_an_earlier_one(base, cut, length, seed)
        found = self.world.look_up(tokens, salt)
        if self.world.in_flight is None:  # else it may see what is pending
            allowed = self.world.findable.longest(salt, tokens)
            assert found == allowed if self.exact else found <= allowed

    # -- what must be true ---------------------------------------------------------------------------------------------

    def alone(self, request_id: str) -> tuple[list[int], str]:
        """What this request gives without a cache and without anybody else: (tokens, why it ends)."""
        request = self.world.requests[request_id]
        tokens = request.prompt_token_ids
        while True:
            tokens.append(self.choose(tokens))
            num_output = len(tokens) - request.num_prompt_tokens
            if num_output > request.sampling.min_tokens and tokens[-1] in request.end_token_ids:
                return tokens[request.num_prompt_tokens :], "stop"
            if (
                num_output == request.sampling.max_tokens
                or len(tokens) == self.max_model_len
                or len(tokens) == self.capacity + 1
            ):
                return tokens[request.num_prompt_tokens :], "length"

    @invariant()
    def outputs_are_exact(self) -> None:
        for request_id, request in self.world.requests.items():
            tokens, reason = self.alone(request_id)
            assert request.output_token_ids == tokens[: request.num_output_tokens]
            if request.is_finished and request.finish_reason != "error" and request_id not in self.ended_from_outside:
                assert (request.output_token_ids, request.finish_reason) == (tokens, reason)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.world.in_flight is not None:
            self.world.update()
        live = [self.world.requests[request_id] for request_id in self.live]
        work = sum(request.num_prompt_tokens + request.sampling.max_tokens for request in live)
        self.world.run(max_steps=(len(live) + 1) * work)
        self.outputs_are_exact()
        stats = self.world.scheduler.stats()
        assert stats.gauges.num_live_blocks == stats.gauges.num_running == 0
        assert stats.gauges.num_waiting == stats.gauges.num_following == 0
        if not self.caching:
            assert stats.gauges.num_cached_blocks == 0
        counters = stats.counters
        ended = counters.num_finished_requests + counters.num_aborted_requests + counters.num_failed_requests
        assert ended == len(self.world.requests)
        if self.clean:
            missed = counters.num_queried_tokens - counters.num_hit_tokens + counters.num_bypassed_tokens
            # After a preemption a request may find prompt tokens that it never computed.
            assert counters.num_computed_prompt_tokens <= missed
            if counters.num_preemptions == 0:
                assert counters.num_computed_prompt_tokens == missed


class OneByteHash(ControlPlane):
    hash_function = one_byte


class ConstantHash(ControlPlane):
    hash_function = constant


class AnyLayout(ControlPlane):
    layouts = any_layout()


class AnyLayoutAndConstantHash(AnyLayout):
    hash_function = constant


TestControlPlane = ControlPlane.TestCase
TestControlPlane.settings = SETTINGS
TestOneByteHash = OneByteHash.TestCase
TestOneByteHash.settings = SETTINGS
TestConstantHash = ConstantHash.TestCase
TestConstantHash.settings = SETTINGS
TestAnyLayout = AnyLayout.TestCase
TestAnyLayout.settings = settings(SETTINGS, max_examples=SETTINGS.max_examples // 4)
TestAnyLayoutAndConstantHash = AnyLayoutAndConstantHash.TestCase
TestAnyLayoutAndConstantHash.settings = settings(SETTINGS, max_examples=SETTINGS.max_examples // 4)
