"""What an `adapter_config.json` says: which layers an adapter changes, with which rank and scale.

Knows PEFT's format and names of layers; must not know tensors or models. What this engine would have to ignore is
refused with the key named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from anaphora.errors import AdapterFileError, UnsupportedAdapterError
from anaphora.runtime.lora.expressions import check_expression, match_all

_T = TypeVar("_T", int, float)

_NO_EFFECT = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",  # it and the two below say how training began
        "eva_config",
        "loftq_config",
        "ensure_weight_tying",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)
"""Keys that say nothing about what a trained adapter computes."""

_READ = frozenset(
    (
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    )
)

_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`: those that leave the weights of the model as they are."""

_REASONS = {
    "use_dora": "DoRA is not supported: train without it, or merge the adapter into the model",
    "modules_to_save": "whole layers beside the adapter are not supported: train without it, or merge the adapter",
    "fan_in_fan_out": "layers with transposed weights (Conv1D) are not supported: merge the adapter into the model",
    "trainable_token_indices": "changed embeddings are not supported: merge the adapter into the model",
    "target_parameters": "bare parameters are not supported as targets: merge the adapter into the model",
    "layer_replication": "replicated layers are not supported: merge the adapter into the model",
}


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The part of a LoRA configuration that says what is computed, for the layers at some paths.

    targets: names (a layer's path, or the end of it after a dot), a regular expression for whole paths, or None for
    every linear layer but the head. excluded: the same, and None for none. layer_indices: of the layers that are
    changed, None for all; layer_lists: names of the module lists that they count in, empty for any. rank_pattern,
    alpha_pattern: by expression for whole paths. matched: of every expression here, the paths that it matches.
    """

    rank: int
    alpha: float
    uses_rslora: bool
    targets: frozenset[str] | str | None
    excluded: frozenset[str] | str | None
    layer_indices: frozenset[int] | None
    layer_lists: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    matched: Mapping[str, frozenset[str]]

    def changes(self, path: str) -> bool:
        """Whether a linear layer at this path is a target."""
        if self.excluded is not None and self._is_named(path, self.excluded):
            return False
        if self.targets is not None and not self._is_named(path, self.targets):
            return False
        return self.layer_indices is None or self._layer_index(path) in self.layer_indices

    def rank_of(self, path: str) -> int:
        return self._by_pattern(path, self.rank_pattern, self.rank)

    def scaling_of(self, path: str) -> float:
        """What the product of the two matrices is multiplied with."""
        rank = self.rank_of(path)
        return self._by_pattern(path, self.alpha_pattern, self.alpha) / (math.sqrt(rank) if self.uses_rslora else rank)

    def _layer_index(self, path: str) -> int | None:
        parts = path.split(".")
        found = [
            int(part)
            for before, part in pairwise(parts[:-1])
            if part.isdecimal() and (not self.layer_lists or before in self.layer_lists)
        ]
        return found[-1] if found else None

    def _is_named(self, path: str, names: frozenset[str] | str) -> bool:
        if isinstance(names, str):
            return path in self.matched[names]
        return path in names or any(path.endswith(f".{name}") for name in names)

    def _by_pattern(self, path: str, patterns: Mapping[str, _T], default: _T) -> _T:
        """The value of the first pattern that matches this path."""
        return next((value for pattern, value in patterns.items() if path in self.matched[pattern]), default)


def parse_settings(text: str, paths: Sequence[str]) -> AdapterSettings:
    """Read an `adapter_config.json`. paths: of the layers that will be asked about.

    Raises AdapterFileError, UnsupportedAdapterError.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterFileError(f"adapter_config.json is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterFileError("adapter_config.json must be a JSON object")
    _refuse_unsupported(fields)
    targets = _targets(fields.get("target_modules"))
    excluded = None if not fields.get("exclude_modules") else _names("exclude_modules", fields["exclude_modules"])
    rank_pattern = {key: _rank("rank_pattern", value) for key, value in _patterns(fields, "rank_pattern")}
    alpha_pattern = {key: _number("alpha_pattern", value) for key, value in _patterns(fields, "alpha_pattern")}
    expressions = [*rank_pattern, *alpha_pattern, *(names for names in (targets, excluded) if isinstance(names, str))]
    return AdapterSettings(
        rank=_rank("r", fields.get("r")),
        alpha=_number("lora_alpha", fields.get("lora_alpha")),
        uses_rslora=_flag("use_rslora", fields.get("use_rslora", False)),
        targets=targets,
        excluded=excluded,
        layer_indices=_layer_indices(fields.get("layers_to_transform")),
        layer_lists=_layer_lists(fields.get("layers_pattern")),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        matched=match_all(list(dict.fromkeys(expressions)), paths),
    )


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise UnsupportedAdapterError(f"peft_type must be LORA, got {fields.get('peft_type')!r}; convert the adapter")
    if fields.get("bias", "none") != "none":
        raise UnsupportedAdapterError(f"bias must be none, got {fields['bias']!r}: trained biases are not supported")
    start = fields.get("init_lora_weights")
    if not any(start is one or (isinstance(start, str) and start == one) for one in _HARMLESS_STARTS):
        raise UnsupportedAdapterError(
            f"init_lora_weights is {start!r}, which changes the model's own weights: save the adapter with PEFT's "
            "conversion to plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for name in sorted(fields.keys() - _READ - _NO_EFFECT):
        value = fields[name]
        if value is None or value is False or value in ("", [], {}):
            continue
        reason = _REASONS.get(name, "this engine does not know the setting, and it may change what is computed")
        raise UnsupportedAdapterError(f"{name} is set: {reason}")


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterFileError(f"{name} must give integers >= 1, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterFileError(f"{name} must give finite numbers, got {str(value)[:40]}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise AdapterFileError(f"{name} must be true or false, got {value!r}")
    return value


def _targets(value: Any) -> frozenset[str] | str | None:
    return None if isinstance(value, str) and value.lower() == "all-linear" else _names("target_modules", value)


def _names(name: str, value: Any) -> frozenset[str] | str:
    """A list of names, or one regular expression."""
    if isinstance(value, str) and value:
        check_expression(name, value)
        return value
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise AdapterFileError(f"{name} must be a list of names or a regular expression, got {str(value)[:80]}")
    return frozenset(value)


def _patterns(fields: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Each pattern as an expression for whole paths: it is a path, or the end of one after a dot."""
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise AdapterFileError(f"{name} must be an object, got {str(value)[:80]}")
    patterns = []
    for key, one in value.items():
        check_expression(name, key)
        whole = rf"(?:.*\.)?(?:{key})"
        check_expression(name, whole)  # flags may stand at the beginning only
        patterns.append((whole, one))
    return patterns


def _layer_indices(value: Any) -> frozenset[int] | None:
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
        raise AdapterFileError(f"layers_to_transform must be a number or a list of numbers, got {str(value)[:80]}")
    return frozenset(values)


def _layer_lists(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(one, str) for one in values):
        raise AdapterFileError(f"layers_pattern must be a name or a list of names, got {str(value)[:80]}")
    return tuple(values)
