"""Makes a loaded model's weights smaller: which of its parts take part, and the proof that the model survives it.

Knows modules and how the library calls them; knows nothing of caches and requests. What takes part are the linear
layers that see every token once, the head, and an embedding that is tied to the head, where codes fit their sizes.
Routed experts, recurrent layers, vision encoders, norms and embeddings of their own stay as they are.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from anaphora.errors import UnsupportedModelError
from anaphora.runtime.codes import BLOCK, GROUP, fits
from anaphora.runtime.lora.targets import find_targets
from anaphora.runtime.quantized_layers import QuantizedEmbedding, QuantizedLinear, StoredWeight

IDENTITIES = {"int8": "int8-group-32", "int4": "int4-group-32"}
"""What the model's identity says of each: another way to choose the codes needs another name."""

LAYER_BITS = {"int8": 8, "int4": 4}
HEAD_BITS = 8
"""Of the head, and so of the embedding that is tied to it: a word's logit is one sum, which no later layer mends."""

NUM_PROBE_TOKENS = 16
# Of the logits of random weights (the worst case: no structure that outweighs the rounding) 0.02 is usual with 8 bits
# and 0.3 with 4. A layer that another module reads past its forward gives 1 and more.
LARGEST_ERROR = {"int8": 0.3, "int4": 0.7}

_logger = logging.getLogger(__name__)


@torch.no_grad()
def quantize_weights(module: PreTrainedModel, form: str) -> None:
    """Replace weights of the module by their codes, one after another, so that at most one is here in both forms.

    form: a key of IDENTITIES.
    Raises UnsupportedModelError if the model has quantised weights already, has no layer for it, or computes something
    else afterwards; the module is then not to be used any more.
    """
    name = type(module).__name__
    if getattr(module.config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"the weights of {name} are quantised already: leave quantization")
    size = num_bytes(module)
    _logger.info("quantising the weights of %s to %s: %d bytes, one matrix after another", name, form, size)
    before = _probe(module)
    _replace_head(module)
    targets = find_targets(module)
    while targets:
        path, layer = targets.popitem()
        if fits(layer.weight):
            module.set_submodule(path, QuantizedLinear(StoredWeight(layer.weight, LAYER_BITS[form]), layer.bias))
        else:
            _log_size(path, layer.weight)
    if not any(isinstance(part, QuantizedLinear) for part in module.modules()):
        raise UnsupportedModelError(f"{name} has no linear layer whose weights could be {form}: leave quantization")
    after = _probe(module)
    error = float((after - before).norm() / before.norm())
    if bool(before.isfinite().all()) and not error <= LARGEST_ERROR[form]:
        raise UnsupportedModelError(
            f"{name} gives other results with {form} weights (relative error {error:.2g}): leave quantization"
        )
    _logger.info("weights of %s are %s: %d bytes instead of %d", name, form, num_bytes(module), size)


def num_bytes(module: torch.nn.Module) -> int:
    """Memory of the parameters and buffers. Tied ones count once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def stored_weights(module: torch.nn.Module) -> dict[str, StoredWeight]:
    """The weights that are codes, by the names that they would have in the `state_dict` if they were not."""
    return {
        f"{path}.weight": part.stored
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, QuantizedLinear | QuantizedEmbedding)
    }


def _log_size(part: str, weight: torch.Tensor) -> None:
    _logger.info("%s keeps its weights: %s is no multiple of %s", part, tuple(weight.shape), (BLOCK, GROUP))


def _replace_head(module: PreTrainedModel) -> None:
    """The head, and with it the embedding that is tied to it; neither, if that embedding does more than look up."""
    model: Any = module
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not torch.nn.Linear:
        return
    paths = {part: path for path, part in module.named_modules()}
    if not fits(head.weight):
        _log_size("the head", head.weight)
        return
    is_tied = embedding.weight is head.weight
    if is_tied and not _only_looks_up(embedding):
        _logger.info("the head keeps its weights, as they are also a %s", type(embedding).__name__)
        return
    stored = StoredWeight(head.weight, HEAD_BITS)
    module.set_submodule(paths[head], QuantizedLinear(stored, head.bias))
    if is_tied:
        module.set_submodule(paths[embedding], QuantizedEmbedding(stored, _scale(embedding)))


def _scale(embedding: torch.nn.Module) -> torch.Tensor | None:
    return embedding._buffers.get("embed_scale")


def _only_looks_up(embedding: Any) -> bool:
    """Whether it gives its rows, times a scale that it shows, and nothing else."""
    if not isinstance(embedding, torch.nn.Embedding) or embedding.max_norm is not None:
        return False
    ids = torch.arange(min(NUM_PROBE_TOKENS, embedding.num_embeddings), device=embedding.weight.device)
    rows, scale = embedding.weight[ids], _scale(embedding)
    return torch.equal(embedding(ids), rows if scale is None else rows * scale.to(rows.dtype))


def _probe(module: PreTrainedModel) -> torch.Tensor:
    """Logits float32 of a few tokens from all over the vocabulary."""
    model: Any = module
    vocab_size = model.get_input_embeddings().num_embeddings
    ids = torch.arange(NUM_PROBE_TOKENS, device=module.device) * max(1, vocab_size // NUM_PROBE_TOKENS) % vocab_size
    logits: torch.Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits
    return logits.float()
