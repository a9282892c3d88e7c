"""The forward pass of a decoder that `anaphora.runtime.decoder` recognises, once it is proven to be the module's own.

Knows both ways to run a step, and chooses; knows nothing of plans. Whatever the module's owner does to it later that
our loop would not do (a hook on a submodule, a submodule or forward replaced) sends that call the library's way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from transformers import PreTrainedModel

from anaphora.runtime.architecture import ModelLayout
from anaphora.runtime.attention import AttentionContext, PagedContext
from anaphora.runtime.decoder import Decoder, NotRecognisedError, Rotations, normalise
from anaphora.runtime.features import InputRows
from anaphora.runtime.forward import PagedForward
from anaphora.runtime.lora.context import AdapterContext
from anaphora.runtime.module_watch import ModuleWatch
from anaphora.runtime.part_check import RecordedStep, check_parts, record_steps
from anaphora.runtime.recogniser import recognise

if TYPE_CHECKING:
    from anaphora.runtime.cpu_step import CpuStep

_logger = logging.getLogger(__name__)


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
        recorded = record_steps(module, layout)
        check_parts(module, layout, decoder, recorded)
    except (NotRecognisedError, TypeError, AttributeError, RuntimeError) as difference:
        _logger.info("%s runs through transformers' own layers, which is slower: %s", name, difference)
        return library
    try:
        kernels = _make_kernels(module, layout, decoder, recorded)
    except (NotRecognisedError, ImportError) as difference:
        _logger.info("%s decodes without kernels, which is slower: %s", name, difference)
        return FastForward(module, decoder)
    return FastForward(module, decoder, kernels)


def few_token_kernels(
    module: PreTrainedModel,
    layout: ModelLayout,
    decoder: Decoder,
    recorded: Sequence[RecordedStep],
    reproducible_tokens: int | None = None,
) -> CpuStep:
    """recorded: of the module. reproducible_tokens: see CpuStep.

    Raises NotRecognisedError, or ImportError where Numba is absent.
    """
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
    check_parts(module, layout, decoder, recorded, kernels)
    return kernels


def _make_kernels(
    module: PreTrainedModel, layout: ModelLayout, decoder: Decoder, recorded: Sequence[RecordedStep]
) -> list[StepKernels]:
    """For many tokens, where the CPU has a tile unit, and for few.

    Raises NotRecognisedError, or ImportError where Numba is absent.
    """
    few = few_token_kernels(module, layout, decoder, recorded)
    from anaphora.runtime.panel_step import PanelStep

    num_heads, num_kv_heads = module.config.get_text_config().num_attention_heads, layout.places[0].shape.num_kv_heads
    try:
        many = PanelStep(decoder, num_heads, num_kv_heads, few, layout.cache.groups)
        check_parts(module, layout, decoder, recorded, many)
    except NotRecognisedError as difference:
        _logger.info("%s computes long prompts by torch, which is slower: %s", type(module).__name__, difference)
        return [few]
    return [many, few]
