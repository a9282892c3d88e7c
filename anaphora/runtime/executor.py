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
from anaphora.core.plan import Admission, ScheduledRequest, StepPlan, StepResult
from anaphora.errors import InvalidParameterError, UnsupportedAdapterError
from anaphora.pooling_params import PoolingParams
from anaphora.runtime.admitted_request import AdmittedRequest
from anaphora.runtime.agreement import check_agreement
from anaphora.runtime.architecture import ModelLayout, check_context
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.fast_forward import Forward, make_forward
from anaphora.runtime.features import FeatureStore, Source, input_rows
from anaphora.runtime.grammar import GrammarFactory
from anaphora.runtime.inputs import StepInputs, build_inputs
from anaphora.runtime.kv_cache import KVCache, bytes_per_token
from anaphora.runtime.lora.adapter import Adapter
from anaphora.runtime.lora.context import AdapterStacks
from anaphora.runtime.pooling import check_dimensions, trained_dimensions
from anaphora.runtime.readout import Readout, pool
from anaphora.runtime.recurrent import state_context
from anaphora.runtime.reproducible import make_reproducible_forward
from anaphora.runtime.state_cache import StateCache
from anaphora.runtime.weights import LiveWeights, WeightUpdate


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
        self._readout = Readout(self._forward, self.vocab_size, one_by_one=self._is_reproducible)
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
        admitted = [self._requests[request.request_id] for request in plan.scheduled]
        rows = [request.row for request in admitted]
        self._tables.append([(row, request.new_block_ids) for row, request in zip(rows, plan.scheduled, strict=True)])
        begin = time.perf_counter()
        self._load_states(plan.scheduled, rows)
        inputs = build_inputs(plan.scheduled, rows, self._tables, self._layout.cache.groups, self._layout.dtype)
        try:
            recurrent = state_context(self._states, inputs.sequences)
            context = PagedContext(self.cache, self._layout.layers, inputs.groups, recurrent)
            adapters = self._stacks.context([request.adapter for request in admitted], inputs)
            given = input_rows(plan.scheduled, [request.features for request in admitted], inputs, self.features)
            logits, hidden = self._forward(
                inputs.input_ids, inputs.position_ids, inputs.sample_rows, context, adapters, given
            )
            logits = logits[:, : self.vocab_size]  # a head padded beyond the vocabulary
            failed = self._readout.find_failed(plan.scheduled, inputs, logits, hidden)
            self._find_broken_states(plan.scheduled, rows, failed)
            scores = self._readout.score(plan.scheduled, admitted, inputs, hidden, failed)
            embeddings = pool(plan.scheduled, admitted, inputs, hidden, failed)
            computed = time.perf_counter()
            sampled, unsampled = self._readout.sample(plan.scheduled, admitted, inputs, logits, failed)
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
        request = AdmittedRequest(admission, self.vocab_size, self._tables.device, self._grammars)
        if admission.adapter is not None:
            request.adapter = self._adapters[admission.adapter]  # its own until it ends, whatever is loaded meanwhile
        request.row = self._tables.take_row()  # last: a request that cannot be made takes none
        self._requests[admission.request_id] = request

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
