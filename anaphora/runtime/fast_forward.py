"""The forward pass of a decoder that `anaphora.runtime.decoder` recognises, and the proof that it is the module's own.

Knows both ways to run a step, and chooses; knows nothing of plans. Whatever the module's owner does to it later that
our loop would not do (a hook on a submodule, a submodule or forward replaced) sends that call the library's way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from transformers import PreTrainedModel

from anaphora.core.ids import TokenId
from anaphora.runtime.agreement import BLOCK_SIZE, probe_request, probe_tables
from anaphora.runtime.architecture import ModelLayout
from anaphora.runtime.attention import AttentionContext, PagedContext
from anaphora.runtime.decoder import Decoder, NotRecognisedError, Rotations, normalise
from anaphora.runtime.features import InputRows
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.inputs import StepInputs, build_inputs
from anaphora.runtime.kv_cache import KVCache
from anaphora.runtime.lora.context import AdapterContext
from anaphora.runtime.module_watch import ModuleWatch
from anaphora.runtime.recogniser import recognise

if TYPE_CHECKING:
    from anaphora.runtime.cpu_step import CpuStep

_logger = logging.getLogger(__name__)

# Largest error of one part that still counts as rounding, relative to what the part gives or adds: in units of the
# last place of its dtype, and the order of sums in float32. Each part is given what the module's own part got, so
# errors do not add up.
TOLERANCE_ULPS = 8.0
TOLERANCE = 2e-5


class Forward(Protocol):
    """One step of a causal LM over a packed batch: see PagedForward."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: AttentionContext,
        adapters: AdapterContext | None = None,
        rows: InputRows = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor: ...


class StepKernels(Protocol):
    """Runs whole steps of one recognised decoder. max_tokens: the most that a step may have, also in `run_layer`."""

    @property
    def max_tokens(self) -> int: ...

    def takes(self, num_tokens: int, context: object, adapters: AdapterContext | None) -> bool:
        """Whether these kernels are for this step."""
        ...

    def __call__(
        self,
        hidden: torch.Tensor,
        rotations: Rotations,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: PagedContext,
        adapters: AdapterContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [len(keep), vocab] and final hidden states [T, hidden] of embeddings [T, hidden]."""
        ...

    def run_layer(
        self,
        number: int,
        hidden: torch.Tensor,
        rotations: Rotations,
        position_ids: torch.Tensor,
        context: PagedContext,
    ) -> torch.Tensor: ...


class FastForward:
    """Runs a recognised decoder layer by layer; the same interface as PagedForward, which it falls back on.

    kernels: the first of them that takes a step runs it. Torch runs the others.
    """

    def __init__(self, module: PreTrainedModel, decoder: Decoder, kernels: Sequence[StepKernels] = ()) -> None:
        self._decoder = decoder
        self._kernels = tuple(kernels)
        self._library = PagedForward(module)  # a recognised decoder has no recurrent layers
        self._watch = ModuleWatch(module)

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: AttentionContext,
        adapters: AdapterContext | None = None,
        rows: InputRows = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kernels = next((one for one in self._kernels if one.takes(input_ids.shape[1], context, adapters)), None)
        if rows or self._watch.is_changed() or (adapters is not None and kernels is None):
            return self._library(input_ids, position_ids, keep, context, adapters, rows)
        decoder = self._decoder
        hidden = decoder.embed(input_ids[0])
        rotations = decoder.rotations(hidden, position_ids)
        if kernels is not None:
            return kernels(hidden, rotations, position_ids, keep, cast(PagedContext, context), adapters)
        for layer in decoder.layers:
            hidden = decoder.run_layer(layer, hidden, rotations, context)
        hidden = normalise(hidden, decoder.norm)
        return decoder.logits(hidden.index_select(0, keep)), hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See PagedForward."""
        return self._library.head(hidden)


def make_forward(module: PreTrainedModel, layout: ModelLayout, *, fast: bool) -> Forward:
    """The fastest forward that is exact for this module; `fast` False takes the library's without a look."""
    library = PagedForward(module, layout.recurrent)
    if not fast:
        return library
    name = type(module).__name__
    try:
        decoder = recognise(module)
        check_parts(module, layout, decoder)
    except (NotRecognisedError, TypeError, AttributeError, RuntimeError) as difference:
        _logger.info("%s runs through transformers' own layers, which is slower: %s", name, difference)
        return library
    try:
        kernels = _make_kernels(module, layout, decoder)
    except (NotRecognisedError, ImportError) as difference:
        _logger.info("%s decodes without kernels, which is slower: %s", name, difference)
        return FastForward(module, decoder)
    return FastForward(module, decoder, kernels)


def few_token_kernels(
    module: PreTrainedModel, layout: ModelLayout, decoder: Decoder, reproducible_tokens: int | None = None
) -> CpuStep:
    """reproducible_tokens: see CpuStep. Raises NotRecognisedError, or ImportError where Numba is absent."""
    if module.device.type != "cpu":
        raise NotRecognisedError(f"it is on {module.device}")
    shapes = {place.shape for place in layout.places}
    if len(shapes) != 1:
        raise NotRecognisedError("its layers have keys and values of different shapes")
    try:
        from anaphora.runtime.cpu_step import CpuStep
    except ImportError as error:
        raise ImportError(f"they need Numba: pip install numba ({error})") from error
    num_heads, num_kv_heads = module.config.get_text_config().num_attention_heads, shapes.pop().num_kv_heads
    kernels = CpuStep(decoder, num_heads, num_kv_heads, layout.cache.groups, reproducible_tokens=reproducible_tokens)
    check_parts(module, layout, decoder, kernels)
    return kernels


def _make_kernels(module: PreTrainedModel, layout: ModelLayout, decoder: Decoder) -> list[StepKernels]:
    """For many tokens, where the CPU has a tile unit, and for few.

    Raises NotRecognisedError, or ImportError where Numba is absent.
    """
    few = few_token_kernels(module, layout, decoder)
    from anaphora.runtime.panel_step import PanelStep

    num_heads, num_kv_heads = module.config.get_text_config().num_attention_heads, layout.places[0].shape.num_kv_heads
    try:
        many = PanelStep(decoder, num_heads, num_kv_heads, few, layout.cache.groups)
        check_parts(module, layout, decoder, many)
    except NotRecognisedError as difference:
        _logger.info("%s computes long prompts by torch, which is slower: %s", type(module).__name__, difference)
        return [few]
    return [many, few]


@torch.inference_mode()
def check_parts(
    module: PreTrainedModel, layout: ModelLayout, decoder: Decoder, kernels: StepKernels | None = None
) -> None:
    """Compare every part with the module's own, on random tokens of two sequences. Raises NotRecognisedError.

    One sequence is cut in two steps, packed with the other, in shuffled blocks, at both ends of the positions that are
    used. Each part is given what the module's own part got.
    """
    lengths = (24, 18)
    generator = torch.Generator().manual_seed(1)
    first, second = (
        [TokenId(token) for token in torch.randint(layout.vocab_size, (n,), generator=generator).tolist()]
        for n in lengths
    )
    tables, num_blocks = probe_tables(layout, max(lengths), module.device)
    own, ours = (
        KVCache(layout.places, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=layout.dtype, device=module.device)
        for _ in range(2)
    )
    for scheduled, rows in (
        ([probe_request(0, first[:11])], [0]),
        ([probe_request(11, first[11:22]), probe_request(0, second[:17])], [0, 1]),
        ([probe_request(22, first[22:23]), probe_request(17, second[17:])], [0, 1]),  # few enough for any kernel
        ([probe_request(23, first[23:])], [0]),
    ):
        inputs = build_inputs(scheduled, rows, tables, layout.cache.groups, layout.dtype)
        _check_step(module, layout, decoder, kernels, inputs, own, ours)


def _check_step(
    module: PreTrainedModel,
    layout: ModelLayout,
    decoder: Decoder,
    kernels: StepKernels | None,
    inputs: StepInputs,
    own: KVCache,
    ours: KVCache,
) -> None:
    keep = torch.arange(inputs.input_ids.shape[1], device=module.device)
    context = PagedContext(own, layout.layers, inputs.groups)
    hidden_states: list[torch.Tensor] = []
    with _recording(module, hidden_states):
        logits, final = PagedForward(module)(inputs.input_ids, inputs.position_ids, keep, context)
    if len(hidden_states) != 2 * len(decoder.layers) or final is None:
        raise NotRecognisedError("its layers are not called once each with hidden states first")
    if not bool(final.isfinite().all()):
        return  # broken by itself: nothing can be compared, and each of its requests fails
    _compare("embedding", decoder.embed(inputs.input_ids[0]), hidden_states[0])
    rotations = decoder.rotations(hidden_states[0], inputs.position_ids)
    context = PagedContext(ours, layout.layers, inputs.groups)
    use_kernels = kernels is not None and len(keep) <= kernels.max_tokens
    for number, layer in enumerate(decoder.layers):
        before, after = hidden_states[2 * number : 2 * number + 2]
        if kernels is not None and use_kernels:
            got = kernels.run_layer(number, before.clone(), rotations, inputs.position_ids, context)
        else:
            got = decoder.run_layer(layer, before.clone(), rotations, context)
        _compare(f"layer {number}", got, after, before)
    _compare("last norm", normalise(hidden_states[-1], decoder.norm), final)
    _compare("head", decoder.logits(final), logits)


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
    """Note what goes into each layer, and what comes out, as [T, hidden]: before, after, before, after..."""

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
