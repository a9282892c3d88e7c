"""From a folder that PEFT has written to an adapter of one model: all of it, or a typed error and nothing.

Knows the weights' file; the folder and its settings are in `folder`, what an adapter is in `adapter`. Each file is read
once and whole before any of it is looked at, so a file that is replaced meanwhile is not half seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from transformers import PreTrainedModel

from anaphora.errors import AdapterFileError, UnsupportedAdapterError
from anaphora.runtime.lora.adapter import Adapter, LowRankPair, make_adapter
from anaphora.runtime.lora.folder import WEIGHTS_FILE, errors_about, read_file, read_settings
from anaphora.runtime.lora.settings import AdapterSettings
from anaphora.runtime.lora.targets import find_targets
from anaphora.runtime.quantized_layers import LinearLayer

_MAX_HEADER_BYTES = 16 << 20
_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_WIDEST_ITEM = 8  # bytes of a float64


class AdapterReader:
    """Reads adapters for one model. May be called from any thread.

    max_rank: the largest rank that is taken; with the model's sizes it also bounds the size of the file.
    """

    def __init__(self, module: PreTrainedModel, *, max_rank: int) -> None:
        self._module = module
        self._max_rank = max_rank
        self._targets: Mapping[str, LinearLayer] | None = None
        self._finding = Lock()

    def __call__(self, folder: str) -> Adapter:
        """Raises AdapterFileError, UnsupportedAdapterError."""
        targets = self._find_targets()
        with errors_about(folder):
            paths = [name for name, _ in self._module.named_modules()]
            settings = read_settings(folder, paths, max_rank=self._max_rank)
            num_features = sum(layer.in_features + layer.out_features for layer in targets.values())
            largest = _MAX_HEADER_BYTES + _WIDEST_ITEM * self._max_rank * num_features
            tensors = _tensors(read_file(Path(folder) / WEIGHTS_FILE, largest))
            return make_adapter(self._pairs(settings, tensors, targets))

    def _find_targets(self) -> Mapping[str, LinearLayer]:
        with self._finding:
            if self._targets is None:
                self._targets = find_targets(self._module)
            return self._targets

    def _pairs(
        self,
        settings: AdapterSettings,
        tensors: Mapping[str, torch.Tensor],
        targets: Mapping[str, LinearLayer],
    ) -> dict[str, LowRankPair]:
        paths = {_path_of(name) for name in tensors}
        self._check_paths(settings, paths, targets)
        pairs = {}
        for path in sorted(paths):
            layer, rank = targets[path], settings.rank_of(path)
            shapes = (rank, layer.in_features), (layer.out_features, rank)
            a, b = (
                _matrix(tensors, f"{_PREFIX}{path}{suffix}", shape, layer.weight)
                for suffix, shape in zip(_SUFFIXES, shapes, strict=True)
            )
            pairs[path] = LowRankPair(layer, a, b, settings.scaling_of(path))
        return pairs

    def _check_paths(self, settings: AdapterSettings, paths: set[str], targets: Mapping[str, LinearLayer]) -> None:
        """What the file holds, what the settings ask for and what the model has are the same layers."""
        known = dict(self._module.named_modules())
        # The head is no target of "all-linear"; as one that is named it is refused below.
        wanted = {path for path in (known if settings.targets is not None else targets) if settings.changes(path)}
        for path in sorted(wanted | paths):
            if path not in known:
                raise AdapterFileError(f"it changes {path}, which the model has not: it was made for another model")
            if path not in targets:
                raise UnsupportedAdapterError(
                    f"it changes {path} ({type(known[path]).__name__}); only linear layers that see every token once "
                    "can be changed, not the head, embeddings, recurrent layers or routed experts: merge the adapter"
                )
        if not paths:
            raise AdapterFileError(f"{WEIGHTS_FILE} holds no weights")
        for path in sorted(wanted - paths):
            raise AdapterFileError(f"{WEIGHTS_FILE} holds nothing for {path}, which target_modules names")
        for path in sorted(paths - wanted):
            raise AdapterFileError(f"{WEIGHTS_FILE} holds weights for {path}, which target_modules does not name")


def _tensors(data: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # a dtype that torch lacks is a KeyError
        raise AdapterFileError(f"{WEIGHTS_FILE} is broken or cut short: {error}") from error


def _path_of(name: str) -> str:
    """The layer that a tensor of the file belongs to."""
    for suffix in _SUFFIXES:
        if name.startswith(_PREFIX) and name.endswith(suffix) and len(name) > len(_PREFIX) + len(suffix):
            return name[len(_PREFIX) : -len(suffix)]
    raise UnsupportedAdapterError(
        f"{WEIGHTS_FILE} holds {name[:200]!r}; only {_PREFIX}PATH{_SUFFIXES[0]} and {_SUFFIXES[1]} are understood"
    )


def _matrix(
    tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int], weight: torch.Tensor
) -> torch.Tensor:
    """A tensor of the file on the device of the layer's own weight, as it is computed with."""
    tensor = tensors.get(name)
    if tensor is None:
        raise AdapterFileError(f"{WEIGHTS_FILE} has no {name}, the other half of a pair")
    if tuple(tensor.shape) != shape:
        raise AdapterFileError(f"{name} has the shape {list(tensor.shape)}, and {list(shape)} is needed")
    if not tensor.dtype.is_floating_point:
        raise AdapterFileError(f"{name} holds {tensor.dtype}: save the adapter in floating point")
    matrix = tensor.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    if not bool(matrix.isfinite().all()):
        raise AdapterFileError(f"{name} holds values that are not finite in {matrix.dtype}")
    return matrix
