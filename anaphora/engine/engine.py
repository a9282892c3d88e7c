"""The loop: add_request, step, abort. One thread; one call at a time.

Knows the scheduler, an executor, perhaps a tokenizer, and a clock. Must not know tensors, models or sockets: torch, a
simulator and a test are executors of this same engine.

    add_request -> check, tokenise, hash, queue            nothing is kept if anything is wrong
    step        -> schedule -> execute -> update -> text   one StepOutput for each request that gained something
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anaphora.core.busy_prefixes import BusyPrefix
from anaphora.core.hashing import lora_key, pack_tokens, root_digest, salt_keys
from anaphora.core.request import Request
from anaphora.core.scheduler import Scheduler
from anaphora.engine.adapters import Adapter, AdapterInfo, AdapterRegistry
from anaphora.engine.capabilities import Capabilities
from anaphora.engine.holdings import Holdings
from anaphora.engine.live_request import LiveRequest
from anaphora.engine.model_identity import ModelIdentity
from anaphora.engine.multimodal import (
    NO_FEATURES,
    PreparedPrompt,
    Prompt,
    PromptReader,
    check_features,
)
from anaphora.engine.one_at_a_time import OneAtATime, exclusive
from anaphora.engine.outputs import EngineStats, RequestOutput, StepOutput
from anaphora.engine.prompt_check import check_priority, check_sampling, check_token_ids
from anaphora.engine.protocols import Clock, Executor, GrammarChecker, HoldsWeights, Tokenizer
from anaphora.engine.recorder import TraceRecorder
from anaphora.engine.seeds import DrawnSeeds
from anaphora.engine.steps import Steps
from anaphora.engine.ttft import NOTHING_BEFORE, TtftClock, TtftParts
from anaphora.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    UnknownRequestError,
    WeightsError,
)
from anaphora.salt_regions import CacheSalt, SaltRegions
from anaphora.sampling_params import SamplingParams


class Engine(Capabilities):
    """Drives requests through a scheduler and an executor, one step at a time.

    tokenizer: None takes and gives token ids only. eos_token_ids: the model's end tokens. seed: requests without a seed
    draw theirs from it, by a counter, so the same calls give the same outputs. clock: seconds; see RequestMetrics.
    grammars: None refuses structured output. recorder: is told of every request that ends. adapters: None refuses LoRA
    adapters. identity: the fields of which the cache's root is the digest. prompt_reader: None takes text and token ids
    only.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Clock,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        grammars: GrammarChecker | None = None,
        recorder: TraceRecorder | None = None,
        adapters: AdapterRegistry | None = None,
        identity: Mapping[str, str] | None = None,
        prompt_reader: PromptReader | None = None,
    ) -> None:
        super().__init__(scheduler, executor, tokenizer, grammars, prompt_reader)
        self.clock = clock
        self._eos_token_ids = eos_token_ids
        self._seeds = DrawnSeeds(seed)
        self.recorder = recorder
        self._holdings = Holdings(adapters, executor)
        self._identity = ModelIdentity({"root": scheduler.cache.root.hex()} if identity is None else identity)
        self.calls = OneAtATime()
        self._live: dict[str, LiveRequest] = {}
        self._steps = Steps(scheduler, executor, clock, self.calls, self._live, self._forget)

    @property
    def identity(self) -> Mapping[str, str]:
        """What the model is, in the fields of which the root is the digest; docs/hash-format.md."""
        return self._identity.fields

    # -- requests come and go ------------------------------------------------------------------------------------------

    @exclusive
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        cache_salt: CacheSalt | None = None,
        priority: int = 0,
        arrival_s: float | None = None,
        before: TtftParts = NOTHING_BEFORE,
        add_special_tokens: bool = True,
        tenant: str | None = None,
        adapter: str | None = None,
        read_again: Callable[[AdapterInfo], Adapter] | None = None,
    ) -> None:
        """Queue a request; `step` runs it. If this raises, nothing of the request is kept.

        prompt: text, token ids in [0, vocab_size), a dict with images or rows of embeddings, or what `read_prompt`
        gave for one (docs/multimodal.md). cache_salt: shares cached blocks only with requests of the same
        salt, or, given as SaltRegions, from some token on. priority: lower first, under the `priority` policy.
        arrival_s: when the request arrived by the engine's clock, if that was before this call. before: what was done
        with it since then; the rest of that time it has waited. add_special_tokens: the tokenizer's own, such as a BOS;
        off for text that holds them already (a rendered chat). tenant: whose pinned blocks its own count among.
        adapter: name of the LoRA adapter that it runs with, to its end, whatever the name stands for later. read_again:
        gives one that has left memory, as `reread_adapter` does, which is what None calls here and now.

        Raises RequestError: EmptyPromptError, InvalidTokenError, InvalidParameterError, PromptTooLongError,
        DuplicateRequestError, UnknownAdapterError, AdapterLimitError; and AdapterChangedError.
        """
        begin_s = self.clock()
        if not isinstance(request_id, str) or not request_id:
            raise InvalidParameterError(f"request_id must be a non-empty string, got {request_id!r}")
        if request_id in self._live or request_id in self._steps.undelivered:
            raise DuplicateRequestError(f"request {request_id!r} is alive already; choose another id")
        sampling = check_sampling(sampling, self.vocab_size, has_tokenizer=self.tokenizer is not None)
        self.check_grammar(sampling)
        self.check_pooling(sampling)
        arrival_s = begin_s if arrival_s is None else arrival_s
        ttft = TtftClock(self.clock, begin_s, arrival_s, before)
        ttft.enter("tokenize_s")
        encoded = self.encode(prompt, add_special_tokens=add_special_tokens)
        given = encoded if isinstance(encoded, PreparedPrompt) else NO_FEATURES
        token_ids = check_token_ids(encoded if given is NO_FEATURES else given.token_ids, self.vocab_size)
        check_features(given, sampling)
        ttft.enter("other_s")
        extra_keys = (*salt_keys(cache_salt, self.block_size), *given.extra_keys)
        with self._holdings.acquired(adapter, given.sources, read_again) as digest:
            request = Request(
                request_id,
                pack_tokens(token_ids),
                sampling,
                seed=self._seeds.look() if sampling.seed is None else sampling.seed,
                priority=check_priority(priority),
                extra_keys=extra_keys if digest is None else (*extra_keys, lora_key(digest)),
                adapter=digest,
                features=given.spans,
                eos_token_ids=self._eos_token_ids,
                on_state=ttft.enter_state,
                tenant=tenant,
            )
            text = prompt if isinstance(prompt, str) else given.text
            live = LiveRequest(request, text, self.tokenizer, arrival_s, ttft)
            ttft.enter("lookup_s")
            self._scheduler.add(request)
        self._live[request_id] = live
        if sampling.seed is None:
            self._seeds.draw()
        self._steps.times.add_s += self.clock() - begin_s

    @exclusive
    def abort(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now; what they have so far comes back, with the finish reason `abort`.

        Raises UnknownRequestError if one of them is not alive; then none is aborted.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(dict.fromkeys(request_ids))
        for request_id in ids:
            if request_id not in self._live and request_id not in self._steps.undelivered:
                raise UnknownRequestError(f"no live request has the id {request_id!r}; it may have finished already")
        now_s = self.clock()
        ended = []
        for request_id in ids:
            last = self._steps.undelivered.pop(request_id, None)
            if last is None:
                self._scheduler.finish(request_id, "abort")
                last = self._forget(request_id).finish(None, "abort", None, now_s)
            if last.output is not None:
                ended.append(last.output)
        return ended

    def _forget(self, request_id: str) -> LiveRequest:
        """A request has ended: the scheduler knows it no more, and what it held of the engine's, it holds no more."""
        live = self._live.pop(request_id)
        if self.recorder is not None:
            self.recorder.record(live.request, live.arrival_s, self.root)
        self._holdings.release(live.request)
        return live

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to deliver."""
        return bool(self._live or self._steps.undelivered)

    @property
    def num_unfinished(self) -> int:
        return len(self._live) + len(self._steps.undelivered)

    # -- one step ------------------------------------------------------------------------------------------------------

    @exclusive
    def step(self) -> list[StepOutput]:
        """Run one step. One StepOutput for each request that gained a token or ended; the last one has the whole.

        If the executor raises, the requests of this step end with the finish reason `error` and the engine serves on.
        KeyboardInterrupt and SystemExit go on to the caller after the same clean-up; the next `step` delivers the ends.
        """
        return self._steps.step()

    # -- LoRA adapters -------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """What is loaded, by name. A snapshot that any thread may take."""
        return self._holdings.adapter_infos

    def read_adapter(self, folder: str | os.PathLike[str]) -> Adapter:
        """Read and check an adapter's files for `load_adapter`, which does it too; slow, and allowed on any thread.

        Raises AdapterError, InvalidParameterError.
        """
        return self._holdings.adapters.read(folder)

    def reread_adapter(self, info: AdapterInfo) -> Adapter:
        """An adapter that has left memory; slow, and allowed on any thread. Raises AdapterChangedError."""
        return self._holdings.adapters.read_again(info)

    @exclusive
    def load_adapter(
        self, name: str, folder: str | os.PathLike[str], *, replace: bool = False, adapter: Adapter | None = None
    ) -> AdapterInfo:
        """From now on requests may name the LoRA adapter in this folder, as PEFT writes it.

        replace: under a name that is in use; the requests that run with it end as they began. adapter: what
        `read_adapter` gave for this folder. Raises AdapterError, InvalidParameterError; then nothing has changed.
        """
        return self._holdings.adapters.load(
            name, folder, adapter or self._holdings.adapters.read(folder), replace=replace
        )

    @exclusive
    def unload_adapter(self, name: str) -> AdapterInfo:
        """Forget a name; the requests that run with it go on. Its blocks stay, for the same content under any name.

        Raises UnknownAdapterError.
        """
        return self._holdings.adapters.unload(name)

    # -- the engine as a whole -----------------------------------------------------------------------------------------

    @exclusive
    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget everything cached. False, and no effect, while requests hold blocks.

        preempt_running: let the running requests give up their blocks first; they compute everything anew.
        """
        return self._scheduler.reset_prefix_cache(preempt_running)

    @exclusive
    def busiest_prefixes(self, count: int) -> list[BusyPrefix]:
        """The cached beginnings that saved the most tokens since the engine began, most first."""
        return self._scheduler.cache.finder.busy_prefixes.busiest(count)

    @exclusive
    def forget(
        self,
        *,
        salt: CacheSalt | None = None,
        adapter: str | None = None,
        prefix: str | Sequence[int] | None = None,
        add_special_tokens: bool = True,
    ) -> int | None:
        """No request that comes later finds what is cached of one salt, one adapter, or one prefix. O(1), or O(prefix).

        salt alone: a text; every block computed under it, wherever it began. adapter alone: a loaded name, or a digest
        in hex; under whatever name and salt. prefix: text or token ids; what begins with its full blocks, under this
        salt and this adapter exactly. Returns how many tokens these blocks hold, None without a prefix.

        Requests that are alive go on and stay exact; what they compute cannot be found later either. The K/V stay in
        memory until their blocks are reused. Raises RequestError.
        """
        digest = None if adapter is None else self._holdings.digest_of(adapter)
        salted = salt_keys(salt, self.block_size)
        keys = salted if digest is None else (*salted, lora_key(digest))
        if prefix is not None:
            token_ids = check_token_ids(self.encode(prefix, add_special_tokens=add_special_tokens), self.vocab_size)
            return self._scheduler.forget_prefix(pack_tokens(token_ids), keys)
        if isinstance(salt, SaltRegions):
            raise InvalidParameterError("a salt is forgotten wherever it begins: give it as a string")
        if len(keys) != 1:
            raise InvalidParameterError("forget one thing at a time: a salt, an adapter, or a prefix")
        self._scheduler.forget(keys[0])
        return None

    @exclusive
    def update_weights(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, abort_running: bool = False
    ) -> bytes:
        """Replace weights of the live model; returns the new root. Nothing cached before can be hit after.

        tensors: a state dict or any part of it, as (name, tensor); all of them are checked before one is changed, and
        are held in memory until then. What counts is their content: the cost is in proportion to what is given. The
        cache's old blocks are not touched, are never found again, and go as the eviction policy says: they are not
        used any more. Their pins end.

        abort_running: end the requests that are alive with the finish reason `error`; the next `step` delivers them.
        Else they are in the way: no output is ever of two models. Raises WeightsError; then nothing has changed.
        """
        if not isinstance(self._executor, HoldsWeights):
            raise WeightsError("this engine's executor holds no weights that could be changed: build it over a model")
        if self._live and not abort_running:
            raise WeightsError(
                f"{len(self._live)} requests are alive: wait until they have finished, or end them (abort_running=True)"
            )
        update = self._executor.prepare_weights(tensors)
        now_s = self.clock()
        for request_id in list(self._live):
            self._scheduler.finish(request_id, "error")
            reason = "the model's weights were changed before the request had finished: send it again"
            self._steps.undelivered[request_id] = self._forget(request_id).finish(None, "error", reason, now_s)
        with self.calls.bookkeeping():  # weights that are half old and half new are not to be served
            update.apply()
            self._identity = self._identity.after(update.history)
            self._scheduler.cache.replace_root(root_digest(self._identity.fields))
        return self.root

    def stats(self) -> EngineStats:
        """A snapshot; plain data."""
        stats = self._scheduler.stats()
        return EngineStats(stats.counters, stats.gauges, replace(self._steps.times), stats.groups, stats.what_if)
