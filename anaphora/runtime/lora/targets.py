"""The linear layers of a model that an adapter may change: found by watching one forward of the model.

Knows modules; must not know adapters' files. An adapter's part is added to the rows of single tokens, so a layer must
see each token of the batch once, in order: routed experts, recurrent layers and the head do not.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from anaphora.runtime.forward import module_lock
from anaphora.runtime.quantized_layers import LinearLayer, QuantizedLinear
from anaphora.runtime.recurrent import takes_a_state

_NUM_TOKENS = 5


@torch.inference_mode()
def find_targets(module: PreTrainedModel) -> dict[str, LinearLayer]:
    """Path -> layer. Runs the model once on a few tokens, while no step runs."""
    model: Any = module
    recurrent = {id(part) for layer in module.modules() if takes_a_state(layer) for part in layer.modules()}
    linears = {
        path: part
        for path, part in module.named_modules()
        if type(part) in (torch.nn.Linear, QuantizedLinear)
        and part is not model.get_output_embeddings()
        and id(part) not in recurrent
    }
    shapes: dict[int, list[tuple[int, ...]]] = {id(part): [] for part in linears.values()}

    def note(part: torch.nn.Module, args: tuple[Any, ...]) -> None:
        shapes[id(part)].append(tuple(args[0].shape) if args else ())

    with module_lock(module):
        hooks = [part.register_forward_pre_hook(note) for part in linears.values()]
        try:
            ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device=module.device)
            model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    return {path: part for path, part in linears.items() if shapes[id(part)] == [(1, _NUM_TOKENS, part.in_features)]}
