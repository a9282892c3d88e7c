"""Targets in this process, from names and options: each model is loaded once, however many variants run on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anaphora.config import EngineConfig
from anaphora.errors import ConfigError

OWN_OPTIONS = ("model", "num_blocks", "kv_cache_bytes", "enable_prefix_caching")
"""Fields of EngineConfig that the benchmark itself decides."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One variant: a name for the tables, and the options of its engines."""

    name: str
    config: EngineConfig


def engine_specs(
    models: Sequence[str], options: Mapping[str, Any], variants: Sequence[str], caching: Sequence[bool]
) -> list[EngineSpec]:
    """Every model with caching on and off as asked, then its variants, which run with caching on.

    options: fields of EngineConfig for all of them. variants: `NAME:OPTION=VALUE,...`. Raises ConfigError.
    """
    specs = []
    for model in models:
        for on in caching:
            name = model if on else f"{model} (caching off)"
            specs.append(EngineSpec(name, _config(model, {**options, "enable_prefix_caching": on})))
        for variant in variants:
            label, colon, text = variant.partition(":")
            if not colon or not label or not text:
                raise ConfigError(f"--variant must look like NAME:OPTION=VALUE,OPTION=VALUE, got {variant!r}")
            changed = parse_options(text.split(","))
            name = label if len(models) == 1 else f"{model} {label}"
            specs.append(EngineSpec(name, _config(model, {**options, **changed})))
    return specs


def parse_options(entries: Sequence[str]) -> dict[str, Any]:
    """`max_num_seqs=8` -> {"max_num_seqs": 8}: JSON where it is JSON, else text. Raises ConfigError."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    options: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in known:
            raise ConfigError(f"an engine option must be NAME=VALUE with a field of EngineConfig, got {entry!r}")
        if name in OWN_OPTIONS:
            raise ConfigError(f"{name} is not to be set here: the benchmark chooses it (see --model, --caching)")
        options[name] = _value(text.strip())
    return options


def _config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    return EngineConfig(model=model, **options)


def _value(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text
