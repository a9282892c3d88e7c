"""Whether the paged path gives what a model gives by itself: a few tokens computed by both.

Knows how a step is made without a plan; knows nothing of the scheduler. Catches classes that ignore explicit positions
or hide a bias from the attention interface, and windows that are not what they were taken for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from anaphora.core.ids import BlockId, RequestId, TokenId, cdiv
from anaphora.core.plan import ScheduledRequest
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.architecture import ModelLayout
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.block_tables import BlockTables
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.inputs import StepInputs, build_inputs
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.recurrent import state_context
from anaphora.runtime.state_cache import StateCache

# Windows and chunks of up to so many tokens are crossed by the comparison. The mask functions of the library show the
# larger ones (see layer_kinds), without the cost of computing as many tokens.
MAX_COMPARED_WINDOW = 128

BLOCK_SIZE = 4


def probe_request(start: int, token_ids: Sequence[TokenId]) -> ScheduledRequest:
    """Tokens to compute, of a request whose block tables are known already."""
    return ScheduledRequest(RequestId("probe"), start, tuple(token_ids), (), sample=False)


def probe_tables(layout: ModelLayout, num_tokens: int, device: torch.device) -> tuple[BlockTables, int]:
    """Tables of two sequences of so many tokens, in shuffled blocks, and the blocks of a pool that has them all."""
    num_groups, width = len(layout.cache.groups), cdiv(num_tokens, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(1)
    blocks = (torch.randperm(2 * num_groups * width, generator=generator) + 1).view(2, num_groups, width).tolist()
    tables = BlockTables(num_groups, 2, num_tokens, BLOCK_SIZE, device)
    tables.append([(row, [[BlockId(block) for block in ids] for ids in groups]) for row, groups in enumerate(blocks)])
    return tables, 1 + 2 * num_groups * width


@torch.inference_mode()
def check_agreement(module: PreTrainedModel, layout: ModelLayout) -> None:
    """Compare the paged path with the model's own forward on two sequences. Raises UnsupportedModelError.

    One sequence is cut in two steps, packed with the other, and in shuffled blocks: positions, masks and reads from
    the pool all take part.
    """
    spans = [kind.span for kind in layout.cache.groups if kind.span is not None and kind.span <= MAX_COMPARED_WINDOW]
    length = min(6 + max(spans, default=0), max(6, layout.max_model_len))
    stride = max(1, layout.vocab_size // (2 * length + 1))
    ids = torch.arange(1, 2 * length + 1).mul_(stride).remainder_(layout.vocab_size).view(2, length)
    expected = module(input_ids=ids.to(module.device), use_cache=False).logits
    first, second = [[TokenId(token) for token in row] for row in ids.tolist()]

    tables, num_blocks = probe_tables(layout, length, module.device)
    cache = KVCache(
        layout.places, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=layout.dtype, device=module.device
    )
    states = None
    if layout.recurrent is not None:
        states = StateCache(layout.recurrent.shapes, num_rows=2, num_slots=0, device=module.device)
    got = torch.empty_like(expected)
    for scheduled, rows in (
        ([probe_request(0, first[:-2])], [0]),
        ([probe_request(0, second[:-1]), probe_request(length - 2, first[-2:])], [1, 0]),
        ([probe_request(length - 1, second[-1:])], [1]),
    ):
        inputs = build_inputs(scheduled, rows, tables, layout.cache.groups, layout.dtype)
        context = PagedContext(cache, layout.layers, inputs.groups, state_context(states, inputs.sequences))
        logits = _logits(module, layout, inputs, context)
        for request, row, (begin, end) in zip(scheduled, rows, inputs.spans, strict=True):
            got[row, request.start : request.start + end - begin] = logits[begin:end]
    # Logits may be masked with huge ones. Where a window cuts is few of the tokens, so they are looked at apart.
    parts = [slice(None, -5), slice(-5, None)] if length > 6 else [slice(None)]
    error = max(_relative_error(got[:, part], expected[:, part]) for part in parts)
    tolerance = 1e-3 if layout.dtype in (torch.float32, torch.float64) else 0.2
    # A model that is broken by itself (non-finite) is not for us to judge: its requests fail one by one.
    if bool(expected.isfinite().all()) and not error <= tolerance:
        raise UnsupportedModelError(
            f"{type(module).__name__} gives other results through the paged attention than by itself (relative error "
            f"{error:.2g}), so it needs something that the attention interface does not show; use another model"
        )


def _logits(module: PreTrainedModel, layout: ModelLayout, inputs: StepInputs, context: PagedContext) -> torch.Tensor:
    keep = torch.arange(inputs.input_ids.shape[1], device=module.device)
    try:
        logits, _ = PagedForward(module, layout.recurrent)(inputs.input_ids, inputs.position_ids, keep, context)
    except (TypeError, AttributeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot be called with packed tokens and without an attention mask ({error}); "
            "use another model"
        ) from error
    return logits


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())
