"""Whether parts of ours give what the module's own give: a few of its steps are noted, and compared part by part.

Knows how a step is made without a plan; knows nothing of the scheduler. Each part is given what the module's own part
got, so errors do not add up. The module computes its steps once, whoever is compared with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from anaphora.core.ids import TokenId
from anaphora.runtime.agreement import BLOCK_SIZE, probe_request, probe_tables
from anaphora.runtime.architecture import ModelLayout
from anaphora.runtime.attention import PagedContext
from anaphora.runtime.decoder import Decoder, NotRecognisedError, normalise
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.inputs import StepInputs, build_inputs
from anaphora.runtime.kv_cache import KVCache

if TYPE_CHECKING:
    from anaphora.runtime.fast_forward import StepKernels

# Largest error of one part that still counts as rounding, relative to what the part gives or adds: in units of the
# last place of its dtype, and the order of sums in float32.
TOLERANCE_ULPS = 8.0
TOLERANCE = 2e-5

LENGTHS = (24, 18)
"""Tokens of the two sequences."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """hidden_states: what goes into each layer, and what comes out, [T, hidden]: before, after, before, after...

    final: after the last norm, [T, hidden]. logits: [T, vocab].
    """

    inputs: StepInputs
    hidden_states: list[torch.Tensor]
    final: torch.Tensor | None
    logits: torch.Tensor


@torch.inference_mode()
def record_steps(module: PreTrainedModel, layout: ModelLayout) -> list[RecordedStep]:
    """The module's own results for random tokens of two sequences.

    One sequence is cut in two steps, packed with the other, in shuffled blocks, at both ends of the positions that are
    used.
    """
    generator = torch.Generator().manual_seed(1)
    first, second = (
        [TokenId(token) for token in torch.randint(layout.vocab_size, (n,), generator=generator).tolist()]
        for n in LENGTHS
    )
    tables, _ = probe_tables(layout, max(LENGTHS), module.device)
    cache, steps = _cache(module, layout), []
    for scheduled, rows in (
        ([probe_request(0, first[:11])], [0]),
        ([probe_request(11, first[11:22]), probe_request(0, second[:17])], [0, 1]),
        ([probe_request(22, first[22:23]), probe_request(17, second[17:])], [0, 1]),  # few enough for any kernel
        ([probe_request(23, first[23:])], [0]),
    ):
        inputs = build_inputs(scheduled, rows, tables, layout.cache.groups, layout.dtype)
        keep = torch.arange(inputs.input_ids.shape[1], device=module.device)
        context = PagedContext(cache, layout.layers, inputs.groups)
        hidden_states: list[torch.Tensor] = []
        with _recording(module, hidden_states):
            logits, final = PagedForward(module)(inputs.input_ids, inputs.position_ids, keep, context)
        steps.append(RecordedStep(inputs, hidden_states, final, logits))
    return steps


def _cache(module: PreTrainedModel, layout: ModelLayout) -> KVCache:
    _, num_blocks = probe_tables(layout, max(LENGTHS), module.device)
    return KVCache(
        layout.places, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=layout.dtype, device=module.device
    )


@torch.inference_mode()
def check_parts(
    module: PreTrainedModel,
    layout: ModelLayout,
    decoder: Decoder,
    recorded: Sequence[RecordedStep],
    kernels: StepKernels | None = None,
) -> None:
    """Compare every part of a decoder, or the layers of its kernels, with the module's own.

    recorded: of this module. Raises NotRecognisedError.
    """
    cache = _cache(module, layout)
    for step in recorded:
        if len(step.hidden_states) != 2 * len(decoder.layers) or step.final is None:
            raise NotRecognisedError("its layers are not called once each with hidden states first")
        if not bool(step.final.isfinite().all()):
            continue  # broken by itself: nothing can be compared, and each of its requests fails
        if kernels is None:
            _compare("embedding", decoder.embed(step.inputs.input_ids[0]), step.hidden_states[0])
            _compare("last norm", normalise(step.hidden_states[-1], decoder.norm), step.final)
            _compare("head", decoder.logits(step.final), step.logits)
        _check_layers(decoder, step, PagedContext(cache, layout.layers, step.inputs.groups), kernels)


def _check_layers(decoder: Decoder, step: RecordedStep, context: PagedContext, kernels: StepKernels | None) -> None:
    rotations = decoder.rotations(step.hidden_states[0], step.inputs.position_ids)
    for number, layer in enumerate(decoder.layers):
        before, after = step.hidden_states[2 * number : 2 * number + 2]
        if kernels is not None and len(before) <= kernels.max_tokens:
            got = kernels.run_layer(number, before.clone(), rotations, step.inputs.position_ids, context)
        else:
            got = decoder.run_layer(layer, before.clone(), rotations, context)
        _compare(f"layer {number}", got, after, before)


def _compare(part: str, got: torch.Tensor, expected: torch.Tensor, before: torch.Tensor | None = None) -> None:
    """`before`: what a layer adds to. Sums are rounded where they are large, and what is added where it is small."""
    if got.shape != expected.shape:
        raise NotRecognisedError(f"its {part} gives another shape")
    ulp = torch.finfo(expected.dtype).eps
    got, expected = got.float(), expected.float()
    added = expected if before is None else expected - before.float()
    error = (got - expected).norm()
    allowed = (TOLERANCE_ULPS * ulp + TOLERANCE) * added.norm() + ulp * expected.norm()
    if not bool(error <= allowed):
        raise NotRecognisedError(f"its {part} gives other results (relative error {float(error / added.norm()):.2g})")


@contextmanager
def _recording(module: PreTrainedModel, hidden_states: list[torch.Tensor]) -> Iterator[None]:
    """See RecordedStep."""

    def note(_: Any, args: tuple[Any, ...], output: Any = None) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if output is None:
            value = args[0] if args else None
        if isinstance(value, torch.Tensor):
            hidden_states.append(value[0].clone())

    model: Any = module
    hooks = [layer.register_forward_pre_hook(note) for layer in model.get_decoder().layers]
    hooks += [layer.register_forward_hook(note) for layer in model.get_decoder().layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
