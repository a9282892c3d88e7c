"""A forward pass in which a token's results have the same bits whatever is computed beside it.

Every step runs in the CPU kernels, however many tokens it has: there each token's sums are taken in an order that
follows from its position and the model's sizes alone. What is left to torch around them is done in shapes that do not
depend on the step: rotations come from a table that is filled in whole blocks of positions, logits of a prompt from
products of one size. Knows a recognised decoder and the kernels; knows nothing of plans. What the kernels cannot run is
refused, never run another way.

The promise holds for one machine, one build and one number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel

from anaphora.core.groups import FullAttention
from anaphora.core.ids import TokenId, cdiv
from anaphora.core.plan import ScheduledRequest
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.agreement import BLOCK_SIZE, probe_request, probe_tables
from anaphora.runtime.architecture import ModelLayout
from anaphora.runtime.attention import AttentionContext, PagedContext
from anaphora.runtime.decoder import Decoder, NotRecognisedError, Rotations
from anaphora.runtime.fast_forward import few_token_kernels
from anaphora.runtime.features import InputRows
from anaphora.runtime.inputs import build_inputs
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.lora.context import AdapterContext
from anaphora.runtime.module_watch import ModuleWatch
from anaphora.runtime.part_check import check_parts, record_steps
from anaphora.runtime.recogniser import recognise

if TYPE_CHECKING:
    from anaphora.runtime.cpu_step import CpuStep

POSITIONS = 256
"""Rotations are computed for so many positions at once, from a multiple of it on."""

CHECKED_TOKENS = 64
"""Kernels take steps of so many tokens even where the engine has none, so that they can be checked."""

HEAD_ROWS = 16
"""A product of so many rows gives each the same bits at every place: looked at when a model is loaded."""


class ReproducibleForward:
    """The same interface as PagedForward, for a decoder whose every step the kernels take.

    Raises UnsupportedModelError where a step asks for what is not reproducible.
    """

    def __init__(self, module: PreTrainedModel, decoder: Decoder, kernels: CpuStep) -> None:
        self._name = type(module).__name__
        self._decoder = decoder
        self._kernels = kernels
        self._watch = ModuleWatch(module)
        self._rotations: Rotations = ()

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: AttentionContext,
        adapters: AdapterContext | None = None,
        rows: InputRows = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if adapters is not None or rows:
            raise _refusal(self._name, "adapters, images and rows of embeddings are computed outside the kernels")
        if self._watch.is_changed():
            raise _refusal(self._name, "it has hooks, or a part or forward that was replaced")
        hidden = self._decoder.embed(input_ids[0])
        if not self._kernels.takes(hidden.shape[0], context):
            raise _refusal(self._name, f"the kernels do not take a step of {hidden.shape[0]} tokens")
        rotations = self._rotations_at(hidden, position_ids)
        return self._kernels(hidden, rotations, position_ids, keep, cast(PagedContext, context))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of final hidden states [n, hidden], in products of HEAD_ROWS rows, whatever n."""
        padded = hidden.new_zeros((cdiv(len(hidden), HEAD_ROWS) * HEAD_ROWS, hidden.shape[1]))
        padded[: len(hidden)] = hidden
        pieces = padded.view(-1, HEAD_ROWS, hidden.shape[1]).unbind()
        return torch.cat([self._decoder.logits(piece) for piece in pieces])[: len(hidden)]

    def _rotations_at(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Rotations:
        """Rows of a table: torch's cosine of a number may depend on where it stands in its tensor."""
        known = self._rotations[0][0].shape[0] if self._rotations else 0
        needed = cdiv(int(position_ids.max()) + 1, POSITIONS) * POSITIONS
        parts = [self._rotations] if known else []
        like = hidden[:1].expand(POSITIONS, -1)
        for begin in range(known, needed, POSITIONS):
            parts.append(self._decoder.rotations(like, torch.arange(begin, begin + POSITIONS).unsqueeze(0)))
        if needed > known:
            pieces = [zip(*columns, strict=True) for columns in zip(*parts, strict=True)]
            self._rotations = tuple((torch.cat(cos), torch.cat(sin)) for cos, sin in pieces)
        at = position_ids[0]
        return tuple((cos.index_select(0, at), sin.index_select(0, at)) for cos, sin in self._rotations)


def make_reproducible_forward(module: PreTrainedModel, layout: ModelLayout, *, max_tokens: int) -> ReproducibleForward:
    """max_tokens: of a step. Raises UnsupportedModelError if this model or this machine cannot hold the promise."""
    name = type(module).__name__
    try:
        if layout.cache.groups != (FullAttention(),):
            raise NotRecognisedError("it has layers that do not see every earlier token")
        decoder = recognise(module)
        recorded = record_steps(module, layout)
        check_parts(module, layout, decoder, recorded)
        kernels = few_token_kernels(module, layout, decoder, recorded, max(max_tokens, CHECKED_TOKENS))
        forward = ReproducibleForward(module, decoder, kernels)
    except (NotRecognisedError, ImportError, TypeError, AttributeError, RuntimeError) as difference:
        raise _refusal(name, str(difference)) from difference
    _check_rows(module, layout, forward)
    return forward


@torch.inference_mode()
def _check_rows(module: PreTrainedModel, layout: ModelLayout, forward: ReproducibleForward) -> None:
    """Compute the same tokens alone, in pieces, and packed with others: the compiler, too, has to keep the promise."""
    length = min(18, layout.max_model_len)
    generator = torch.Generator().manual_seed(1)
    first, second = (
        [TokenId(token) for token in torch.randint(layout.vocab_size, (length,), generator=generator).tolist()]
        for _ in range(2)
    )
    tables, num_blocks = probe_tables(layout, length, module.device)

    def run(*steps: tuple[list[ScheduledRequest], list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden states of the tokens of row 0."""
        cache = KVCache(
            layout.places, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=layout.dtype, device=module.device
        )
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for scheduled, rows in steps:
            inputs = build_inputs(scheduled, rows, tables, layout.cache.groups, layout.dtype)
            keep = torch.arange(inputs.input_ids.shape[1])
            context = PagedContext(cache, layout.layers, inputs.groups)
            logits, hidden = forward(inputs.input_ids, inputs.position_ids, keep, context)
            assert hidden is not None
            begin, end = inputs.spans[rows.index(0)]
            found.append((logits[begin:end], hidden[begin:end]))
        logits, hidden = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logits, hidden

    def piece(tokens: list[TokenId], begin: int, end: int) -> ScheduledRequest:
        return probe_request(begin, tokens[begin:end])

    half = length // 2
    if half == 0:
        return
    one_by_one = [([piece(first, begin, begin + 1)], [0]) for begin in range(2 * half)]
    packed = [([piece(first, begin, begin + half), piece(second, begin, begin + half)], [0, 1]) for begin in (0, half)]
    alone, together = run(*one_by_one), run(*packed)
    if not bool(alone[0].isfinite().all()):
        return  # broken by itself: each of its requests fails
    if not all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)):
        raise _refusal(type(module).__name__, "on this machine the kernels give a token other bits beside other tokens")
    rows = alone[1]
    if not torch.equal(forward.head(rows), torch.cat([forward.head(row.unsqueeze(0)) for row in rows])):
        raise _refusal(type(module).__name__, "on this machine torch gives a row other bits at another place")


def _refusal(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} cannot be run reproducibly: {reason}; leave the option reproducible out, or use a Llama-type model"
    )
