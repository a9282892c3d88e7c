"""The torch executor: a plan in, a forward pass, a result out.

Knows requests only as far as plans tell: a block-table row, and how their tokens are chosen. What a step costs does
not grow with a request's history, attention excepted.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from anaphora.core.ids import RequestId
from anaphora.core.plan import Admission, Embedding, SampledToken, ScheduledRequest, StepPlan, StepResult
from anaphora.errors import InvalidParameterError, UnsupportedAdapterError
from anaphora.pooling_params import PoolingParams
from anaphora.runtime.admitted_request import AdmittedRequest
from anaphora.runtime.agreement import check_agreement
from anaphora.runtime.architecture import ModelLayout, check_context
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.fast_forward import Forward, make_forward
from anaphora.runtime.features import FeatureStore, Source, input_rows
from anaphora.runtime.grammar import GrammarError, GrammarFactory
from anaphora.runtime.inputs import StepInputs, build_inputs
from anaphora.runtime.kv_cache import KVCache, bytes_per_token
from anaphora.runtime.lora.adapter import Adapter
from anaphora.runtime.lora.context import AdapterStacks
from anaphora.runtime.pooling import check_dimensions, trained_dimensions
from anaphora.runtime.recurrent import state_context
from anaphora.runtime.reproducible import make_reproducible_forward
from anaphora.runtime.sampler import SamplingRow, report, row_by_row, sample
from anaphora.runtime.state_cache import StateCache
from anaphora.runtime.weights import LiveWeights, WeightUpdate

# Logits of a prompt are made for so many positions at once: in float32, half a gigabyte for the largest vocabularies.
SCORED_ROWS = 256


class TorchExecutor:
    """Computes plans with a loaded `transformers` causal LM; implements `anaphora.engine.protocols.Executor`.

    layout: what `inspect_model` says of the module.
    num_blocks: usable blocks and the null block. max_num_seqs: most requests admitted at once.
    max_table_len: most tokens of one request, for the size of the block tables; None takes the layout's max_model_len.
    num_state_slots: checkpoints of recurrent state. dtype: of the pool. device: of the module and the pool.
    fast_forward: run decoders of a known structure without the library's layers; the results are the same.
    max_reproducible_tokens: None, or how many tokens a step has at most: then a request's results have the same bits
        whatever is computed beside it, and what cannot hold that is refused.
    grammars: for structured output; None has none. features: what stands in prompts instead of tokens; None takes none.

    The module's forward is used as it is; its settings are untouched between calls.
    Raises UnsupportedModelError.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        layout: ModelLayout,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_table_len: int | None = None,
        num_state_slots: int = 0,
        dtype: torch.dtype,
        device: torch.device | str,
        fast_forward: bool = True,
        max_reproducible_tokens: int | None = None,
        grammars: GrammarFactory | None = None,
        features: FeatureStore | None = None,
    ) -> None:
        device = torch.device(device)
        module.train(False)
        check_context(module, layout.max_model_len)
        check_agreement(module, layout)
        self._layout = layout
        self.device = device
        self.vocab_size = layout.vocab_size
        self.cache = KVCache(layout.places, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
        self._tables = BlockTables(
            len(layout.cache.groups), max_num_seqs, max_table_len or layout.max_model_len, block_size, device
        )
        self._states: StateCache | None = None
        if layout.recurrent is not None:
            shapes = layout.recurrent.shapes
            self._states = StateCache(shapes, num_rows=max_num_seqs, num_slots=num_state_slots, device=device)
        self._is_reproducible = max_reproducible_tokens is not None
        self._forward: Forward
        if max_reproducible_tokens is None:
            self._forward = make_forward(module, self._layout, fast=fast_forward)
        else:
            self._forward = make_reproducible_forward(module, self._layout, max_tokens=max_reproducible_tokens)
        self._choose = row_by_row(sample) if self._is_reproducible else sample
        self._report = row_by_row(report) if self._is_reproducible else report
        self._grammars = grammars
        self._hidden_size: int | None = getattr(module.config.get_text_config(), "hidden_size", None)
        self._trained_dimensions = trained_dimensions(module.config)
        self._requests: dict[RequestId, AdmittedRequest] = {}
        self._adapters: dict[str, Adapter] = {}  # by digest
        self._stacks = AdapterStacks()
        self._weights = LiveWeights(module)
        self.features = features or FeatureStore(None, 0)

    def prepare_weights(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> WeightUpdate:
        """Check tensors that are to replace the model's own; see runtime.weights. Raises WeightsError."""
        return self._weights.prepare(tensors)

    def add_adapter(self, adapter: Adapter) -> None:
        """From now on plans may name it by its digest. Raises UnsupportedAdapterError."""
        if self._is_reproducible:
            raise UnsupportedAdapterError("adapters cannot be run reproducibly: leave the option reproducible out")
        self._adapters[adapter.digest] = adapter

    def remove_adapter(self, digest: str) -> None:
        """No later plan admits a request with it. Those that were admitted keep it."""
        del self._adapters[digest]
        self._stacks.clear()

    def add_features(self, sources: Mapping[str, Source]) -> None:
        """One more request whose plans may name these by digest. Raises InvalidParameterError."""
        if self._is_reproducible:
            raise InvalidParameterError(
                "images and rows of embeddings cannot be computed reproducibly: leave the option reproducible out"
            )
        self.features.hold(sources)

    def release_features(self, digests: Iterable[str]) -> None:
        """One request less."""
        self.features.release(digests)

    @property
    def num_groups(self) -> int:
        """Attention groups, each with a block table of its own."""
        return len(self._layout.cache.groups)

    @property
    def kv_cache_bytes(self) -> int:
        """Memory of the pool, the null block among it, and of recurrent states."""
        return self.cache.num_bytes + (0 if self._states is None else self._states.num_bytes)

    @property
    def weights_bytes(self) -> int:
        """Memory of the model's parameters and buffers; what is tied counts once."""
        return self._weights.num_bytes

    @property
    def kv_bytes_per_token(self) -> tuple[int, ...]:
        """What one token takes in each group."""
        return bytes_per_token(self.cache.layers, self.cache.dtype)

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget requests, as a plan may ask for."""
        for request_id in request_ids:
            released = self._requests.pop(request_id, None)  # None: its admission was in a plan that failed before it
            if released is not None:
                self._tables.release_row(released.row)

    def check_pooling(self, pooling: PoolingParams) -> None:
        """Whether this model gives such an embedding. Raises InvalidParameterError."""
        check_dimensions(pooling.dimensions, self._hidden_size, self._trained_dimensions)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. On any exception the slots that it may have written are zero and the exception goes on."""
        with self._weights.in_use():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        self.release(plan.released)
        for admission in plan.admitted:
            self._admit(admission)
        self._weights.check_current()
        self.features.follow(self._weights.history)
        states = [self._requests[request.request_id] for request in plan.scheduled]
        rows = [state.row for state in states]
        self._tables.append([(row, request.new_block_ids) for row, request in zip(rows, plan.scheduled, strict=True)])
        begin = time.perf_counter()
        self._load_states(plan.scheduled, rows)
        inputs = build_inputs(plan.scheduled, rows, self._tables, self._layout.cache.groups, self._layout.dtype)
        try:
            states_context = state_context(self._states, inputs.sequences)
            context = PagedContext(self.cache, self._layout.layers, inputs.groups, states_context)
            adapters = self._stacks.context([state.adapter for state in states], inputs)
            given = input_rows(plan.scheduled, [state.features for state in states], inputs, self.features)
            logits, hidden = self._forward(
                inputs.input_ids, inputs.position_ids, inputs.sample_rows, context, adapters, given
            )
            logits = logits[:, : self.vocab_size]  # a head padded beyond the vocabulary
            failed = self._find_failed(plan.scheduled, inputs, logits, hidden)
            self._find_broken_states(plan.scheduled, rows, failed)
            scores = self._score(plan.scheduled, states, inputs, hidden, failed)
            embeddings = self._pool(plan.scheduled, states, inputs, hidden, failed)
            computed = time.perf_counter()
            sampled, unsampled = self._sample(plan.scheduled, states, inputs, logits, failed)
            done = time.perf_counter()
        except BaseException:
            self._wipe(inputs, 0, inputs.input_ids.shape[1])
            raise
        for i in failed:
            self._wipe(inputs, *inputs.spans[i])
        self._save_states(plan.scheduled, rows, failed)
        return StepResult(
            sampled=sampled,
            failed={plan.scheduled[i].request_id: reason for i, reason in failed.items()},
            unsampled=unsampled,
            compute_s=computed - begin,
            sample_s=done - computed,
            prompt_logprobs={plan.scheduled[i].request_id: tuple(tokens) for i, tokens in scores.items()},
            embeddings=embeddings,
        )

    def _admit(self, admission: Admission) -> None:
        state = AdmittedRequest(admission, self.vocab_size, self._tables.ids.device, self._grammars)
        if admission.adapter is not None:
            state.adapter = self._adapters[admission.adapter]  # its own until it ends, whatever is loaded meanwhile
        state.row = self._tables.take_row()  # last: a request that cannot be made takes none
        self._requests[admission.request_id] = state

    def _load_states(self, scheduled: Sequence[ScheduledRequest], rows: Sequence[int]) -> None:
        if self._states is not None:
            for request, row in zip(scheduled, rows, strict=True):
                if request.load_state is not None:
                    self._states.load(row, request.load_state)

    def _find_broken_states(
        self, scheduled: Sequence[ScheduledRequest], rows: Sequence[int], failed: dict[int, str]
    ) -> None:
        """A state that has overflowed may not show in the outputs yet, and is not to be kept for others."""
        if self._states is not None:
            for i, (request, row) in enumerate(zip(scheduled, rows, strict=True)):
                if request.save_state is not None and i not in failed and not self._states.is_finite(row):
                    failed[i] = "the model's recurrent state is not all finite"

    def _save_states(self, scheduled: Sequence[ScheduledRequest], rows: Sequence[int], failed: Container[int]) -> None:
        if self._states is not None:
            for i, (request, row) in enumerate(zip(scheduled, rows, strict=True)):
                if request.save_state is not None and i not in failed:
                    self._states.save(row, request.save_state)

    def _wipe(self, inputs: StepInputs, begin: int, end: int) -> None:
        """Zero what the packed tokens [begin, end) wrote, in every group."""
        for group in inputs.groups:
            self.cache.wipe(group.slot_mapping[begin:end])

    def _find_failed(
        self,
        scheduled: tuple[ScheduledRequest, ...],
        inputs: StepInputs,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> dict[int, str]:
        """Indices of the scheduled requests whose output is not finite, with the reason."""
        if hidden is None:
            raise RuntimeError("the model did not show its hidden states, which it did when it was inspected")
        # A sum is finite only if every term is, and far cheaper than asking each; an overflow is looked into below.
        if bool(hidden.sum(dtype=torch.float32).isfinite() & logits.sum(dtype=torch.float32).isfinite()):
            return {}
        failed: dict[int, str] = {}
        finite = hidden.isfinite().all(dim=-1).tolist()
        for i, (begin, end) in enumerate(inputs.spans):
            if not all(finite[begin:end]):
                # Which token was first cannot be told: attention carries a NaN to masked positions, too.
                first = scheduled[i].start
                failed[i] = (
                    f"the model's hidden states at positions {first} to {first + end - begin - 1} are not all finite"
                )
        for i, finite_logits in zip(inputs.sampled, logits.isfinite().all(dim=-1).tolist(), strict=True):
            if not finite_logits and i not in failed:
                failed[i] = "the model's logits are not finite"
        return failed

    def _score(
        self,
        scheduled: tuple[ScheduledRequest, ...],
        states: list[AdmittedRequest],
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        failed: dict[int, str],
    ) -> dict[int, list[SampledToken]]:
        """Index of a scheduled request -> what StepResult.prompt_logprobs says of it. Adds to `failed`."""
        scores: dict[int, list[SampledToken]] = {}
        for i, (request, state) in enumerate(zip(scheduled, states, strict=True)):
            if state.prompt is None or hidden is None or i in failed:
                continue
            tokens = state.prompt[request.start + 1 : request.start + 1 + len(request.token_ids)]
            rows = hidden[inputs.spans[i][0] :][: len(tokens)]
            entries: list[SampledToken] = []
            for begin in range(0, len(tokens), SCORED_ROWS):
                piece = tokens[begin : begin + SCORED_ROWS]
                logits = self._forward.head(rows[begin : begin + SCORED_ROWS])[:, : self.vocab_size].float()
                if not bool(logits.sum().isfinite()) and not bool(logits.isfinite().all()):
                    failed[i] = "the model's logits at positions of the prompt are not all finite"
                    break
                entries += self._report(logits, piece, [state.sampling.prompt_logprobs or 0] * len(piece))
            else:
                scores[i] = entries
        return scores

    def _pool(
        self,
        scheduled: tuple[ScheduledRequest, ...],
        states: list[AdmittedRequest],
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        failed: dict[int, str],
    ) -> dict[RequestId, Embedding]:
        """What StepResult.embeddings says."""
        embeddings: dict[RequestId, Embedding] = {}
        for i, (request, state) in enumerate(zip(scheduled, states, strict=True)):
            if state.pooler is None or hidden is None or i in failed:
                continue
            begin, end = inputs.spans[i]
            embedding = state.pooler.take(request.start, hidden[begin:end])
            if embedding is not None:
                embeddings[request.request_id] = embedding
        return embeddings

    def _sample(
        self,
        scheduled: tuple[ScheduledRequest, ...],
        states: list[AdmittedRequest],
        inputs: StepInputs,
        logits: torch.Tensor,
        failed: dict[int, str],
    ) -> tuple[dict[RequestId, SampledToken], dict[RequestId, str]]:
        """What StepResult.sampled and unsampled say."""
        for request, state in zip(scheduled, states, strict=True):
            state.extend(request.start, request.token_ids)
        sampling_rows: dict[int, SamplingRow] = {}
        unsampled: dict[RequestId, str] = {}
        for i in inputs.sampled:
            if i not in failed:
                request = scheduled[i]
                try:
                    sampling_rows[i] = states[i].row_at(request.start + len(request.token_ids))
                except GrammarError as error:
                    unsampled[request.request_id] = str(error)
        if not sampling_rows:
            return {}, unsampled
        if len(sampling_rows) < len(inputs.sampled):
            logits = logits[[i in sampling_rows for i in inputs.sampled]]
        tokens = self._choose(logits, list(sampling_rows.values()))
        sampled = {scheduled[i].request_id: token for i, token in zip(sampling_rows, tokens, strict=True)}
        return sampled, unsampled
