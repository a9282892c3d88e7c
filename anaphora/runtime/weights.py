"""Weights of a live model: new tensors are checked whole, then copied in, and every engine over the module knows.

Knows tensors and one module; must not know requests, caches or roots. Tensors are copied into the module's own, so
whatever holds a reference to those (the layers, the decoder of the fast path) computes with the new ones. Of a weight
that the module holds as codes, callers give the full one, by its usual name and dtype; it is quantised as it comes in.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_

import torch
from transformers import PreTrainedModel

from anaphora.errors import WeightsError
from anaphora.runtime.forward import module_lock
from anaphora.runtime.quantization import num_bytes, stored_weights
from anaphora.runtime.quantized_layers import StoredWeight
from anaphora.runtime.sources.digests import canonical_json, tensors_digest, text_digest

Target = torch.Tensor | StoredWeight

# On the module, as what was done to it concerns every engine over it.
_CHANGES = "_anaphora_weights"
_VERSIONS = "_anaphora_versions"


class LiveWeights:
    """One engine's view of a module's weights. history: digest of all updates of the module that it has seen."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._parameters = [part._parameters for part in module.modules() if part._parameters]
        self._found: list[torch.nn.Parameter | None] = []
        self._identities: tuple[int, ...] = ()
        self._counted: list[torch.Tensor] = []
        self._versions = self._versions_now()
        self.history = self._of_module()

    def _versions_now(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Others after every write to a parameter, and in place of a replaced one, as far as torch counts them: a write
        through `.data` is not seen, nor one to a submodule that came later."""
        # At every step, of hundreds of tensors, so what differs per tensor runs in C. They are kept while they are
        # the module's, and no other tensor has the identity of one of them meanwhile.
        found = [*chain.from_iterable(map(dict.values, self._parameters))]
        if not (len(found) == len(self._found) and all(map(is_, found, self._found))):
            tensors = [tensor for tensor in found if tensor is not None]
            self._found, self._identities = found, (*map(id, tensors),)
            self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        return self._identities, (*map(attrgetter("_version"), self._counted),)

    def _is_tampered_with(self) -> bool:
        """Whether a parameter was written to by other than update_weights since this engine last looked."""
        now = self._versions_now()
        if now != self._versions and now == vars(self._module).get(_VERSIONS):  # another engine has given the same
            self._versions = now
        return now != self._versions

    def _of_module(self) -> str:
        history: str = vars(self._module).get(_CHANGES, "")
        return history

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While this lasts, no engine over the module changes them: what `check_current` has said stays true."""
        with module_lock(self._module):
            yield

    @property
    def num_bytes(self) -> int:
        """Memory of the parameters and buffers; what is tied counts once."""
        return num_bytes(self._module)

    def check_current(self) -> None:
        """Raises WeightsError if others have changed the weights: K/V here are of the old ones."""
        if self.history != self._of_module():
            raise WeightsError(
                "the model's weights were changed through another engine that shares the module: "
                "call update_weights on this one, too"
            )
        if self._is_tampered_with():
            raise WeightsError(
                "the model's weights were written to behind the engine's back, and what is cached is of the old ones: "
                "give the new ones to update_weights"
            )

    def take_over(self, history: str) -> None:
        """The module is as it should be, after these updates."""
        self.history = history
        self._versions = self._versions_now()
        vars(self._module).update({_CHANGES: history, _VERSIONS: self._versions})

    def prepare(self, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """Check that every tensor fits; changes nothing.

        tensors: names of the module's `state_dict`, any part of it; each of the shape and dtype that it replaces.
        Costs a pass over what is given, for its digest; over all weights, if others have written to them. Where
        another engine has put these very values into the module, this one catches up with it, and both are current.
        Raises WeightsError.
        """
        pairs = list(tensors.items()) if isinstance(tensors, Mapping) else _pairs(tensors)
        if not pairs:
            raise WeightsError("update_weights was given no tensor: name what has changed")
        own = _own(self._module)
        given: dict[str, torch.Tensor] = {}
        by_target: dict[int, str] = {}
        for name, tensor in pairs:
            _check(name, tensor, own)
            if name in given:
                raise WeightsError(f"{name} is given twice: give it once")
            twin = by_target.setdefault(id(own[name]), name)
            if twin != name and not torch.equal(given[twin], tensor):
                raise WeightsError(f"{name} and {twin} are one tensor of the model and are given different values")
            given[name] = tensor.detach()
        history, is_tampered = self._of_module(), self._is_tampered_with()
        is_behind = self.history != history and all(_holds(own[name], one) for name, one in given.items())
        if is_tampered or not is_behind:
            changed = _tensors(self._module) | given if is_tampered else given
            history = text_digest(canonical_json([history, tensors_digest(changed.items())]))
        return WeightUpdate(self, own, given, history)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Tensors that fit. history: digest of all updates up to and with this one."""

    _weights: LiveWeights
    _own: Mapping[str, Target]
    _given: Mapping[str, torch.Tensor]
    history: str

    @torch.no_grad()
    def apply(self) -> None:
        """Copy them in. No forward may run meanwhile."""
        staged = {name: tensor.to(self._own[name].device) for name, tensor in self._given.items()}  # may lack memory
        with module_lock(self._weights._module):  # a step of another engine over the module ends first
            for name, tensor in staged.items():
                self._own[name].copy_(tensor)
            self._weights.take_over(self.history)


def _own(module: PreTrainedModel) -> dict[str, Target]:
    """What can be replaced, by name."""
    stored = stored_weights(module)
    codes = {id(part) for weight in stored.values() for part in (weight.codes, weight.scales)}
    own: dict[str, Target] = {name: tensor for name, tensor in _tensors(module).items() if id(tensor) not in codes}
    return own | stored


def _tensors(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _holds(target: Target, tensor: torch.Tensor) -> bool:
    if isinstance(target, StoredWeight):
        return target.holds(tensor)
    return torch.equal(tensor.to(target.device), target)


def _pairs(tensors: object) -> list[tuple[str, torch.Tensor]]:
    if not isinstance(tensors, Iterable) or isinstance(tensors, str | bytes | torch.Tensor):
        raise WeightsError(f"update_weights takes a state dict or (name, tensor) pairs, got {type(tensors).__name__}")
    pairs = []
    for pair in tensors:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise WeightsError(f"update_weights takes (name, tensor) pairs, got an entry of {type(pair).__name__}")
        pairs.append((pair[0], pair[1]))
    return pairs


def _check(name: object, tensor: object, own: Mapping[str, Target]) -> None:
    if not isinstance(name, str) or name not in own:
        similar = difflib.get_close_matches(name, own, n=1) if isinstance(name, str) else []
        raise WeightsError(f"the model has no tensor {name!r}{f': did you mean {similar[0]}?' if similar else ''}")
    target = own[name]
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise WeightsError(f"{name} must be a dense tensor with values, got {type(tensor).__name__}")
    if tensor.shape != target.shape:
        raise WeightsError(f"{name} has the shape {list(tensor.shape)}, the model's has {list(target.shape)}")
    if tensor.dtype != target.dtype:
        raise WeightsError(f"{name} is {tensor.dtype}, the model's is {target.dtype}: convert it first")
    if not _is_finite(tensor) and (isinstance(target, StoredWeight) or _is_finite(target)):
        raise WeightsError(f"{name} holds infinities or NaN: every request would fail with it; give finite numbers")
    if isinstance(target, StoredWeight) and not target.can_hold(tensor):
        raise WeightsError(f"{name} holds numbers too large for quantised weights, whose scales are float16")


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    # One pass that keeps nothing, and a tenth of what `isfinite` takes; both extremes are NaN where anything is.
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor.detach()))
