"""A file of options, TOML or JSON, as the defaults of one command. Knows typer's commands; no option by name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import typer

from anaphora.errors import ConfigError


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make what the file says the defaults of this command. Raises ConfigError."""
    if path is None:
        return None
    parameters: dict[str, Any] = {}
    for parameter in context.command.params:
        for flag in (*parameter.opts, parameter.name or ""):
            parameters[_plain(flag.lstrip("-"))] = parameter
    document = _load(path)
    unknown = sorted({_plain(name) for name in document} - (parameters.keys() - {"config", "help", "h"}))
    if unknown:
        raise ConfigError(f"{path} sets unknown options: {', '.join(unknown)}; see `anaphora serve --help`")
    defaults: dict[str, Any] = {}
    for name, value in document.items():
        parameter = parameters[_plain(name)]
        if parameter.name in defaults:
            raise ConfigError(f"{path} sets {name} twice, under two spellings of its name: leave one of them out")
        if isinstance(value, bool) and not parameter.is_flag:  # which would be taken for the number 1 or 0
            raise ConfigError(f"{path} sets {name} to {str(value).lower()}, and it is no switch: give a value")
        defaults[parameter.name] = [value] if isinstance(value, str) and parameter.multiple else value
    context.default_map = defaults
    return path


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _load(path: Path) -> dict[str, Any]:
    """TOML, or JSON by its suffix. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # both decoders' errors are ValueErrors
        raise ConfigError(f"the configuration {path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"the configuration {path} must be a table of options")
    return document
