"""Decides what a name is: built-in, folder, GGUF file or hub id; and refuses what can be none of them.

Looks at names and at whether files exist; fetches, reads and converts nothing, and imports no tensor library, so that a
wrong name is told at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from anaphora.engine.chat_template import NO_CHAT_TEMPLATE
from anaphora.errors import InvalidParameterError, ModelError, ModelFileError, UnknownModelError
from anaphora.runtime.sources.builtin import BUILTIN_MODELS, BuiltinModel, close_matches, find_builtin

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_model(
    model: str | os.PathLike[str],
    builtin_models: tuple[BuiltinModel, ...] = BUILTIN_MODELS,
    *,
    what: str = "model",
) -> BuiltinModel | Path | str:
    """The built-in model, the folder with a config.json, the GGUF file, or the hub id that this name stands for.

    A built-in name wins over a folder of that name (`./name` is the folder); a folder or file wins over a hub id.
    what: what to call it in errors. Raises UnknownModelError, ModelFileError.
    """
    name = os.fspath(model)
    if isinstance(model, str) and (builtin := find_builtin(name, builtin_models)) is not None:
        return builtin
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        return _inside(path)
    if name and os.path.exists(path):
        if not os.path.isfile(path):  # opening a pipe would wait for who writes to it
            raise ModelFileError(f"{path} is a pipe or a device: give a folder or a GGUF file")
        return path
    if isinstance(model, str) and _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return name
    raise UnknownModelError(_unknown(model, name, builtin_models, what))


def is_model(name: str) -> bool:
    """Whether it can be meant for nothing else: a built-in name, the folder of a model, or a GGUF file that is here."""
    try:
        found = find_model(name)
    except ModelError:
        return False
    return isinstance(found, BuiltinModel) or (isinstance(found, Path) and (found.is_dir() or found.suffix == ".gguf"))


def check_names(model: str, tokenizer: str | None = None, *, needs_chat_template: bool = False) -> None:
    """Refuse a model or tokenizer of which nothing can come, before anything is fetched or imported for it.

    Raises UnknownModelError, ModelFileError; InvalidParameterError for a built-in model without the template it needs.
    """
    found = find_model(model)
    if tokenizer is not None:
        if not os.path.isdir(os.path.expanduser(tokenizer)):  # a folder with a tokenizer alone is no model
            find_model(tokenizer, what="tokenizer")
    elif needs_chat_template and isinstance(found, BuiltinModel) and not found.has_chat_template:
        raise InvalidParameterError(NO_CHAT_TEMPLATE)


def _unknown(model: object, name: str, builtin_models: tuple[BuiltinModel, ...], what: str) -> str:
    prefix = "" if what == "model" else f"{what}: "
    if not isinstance(model, str) or os.sep in name or name.startswith((".", "~")) or name.endswith(".gguf"):
        return f"{prefix}there is no file or folder {name}: check the path"
    similar = close_matches(name, builtin_models)
    hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
    names = ", ".join(model.name for model in builtin_models)
    return (
        f"unknown {what} {name!r}.{hint} Built-in models: {names}. Or give a folder, a GGUF file, or a hub id, "
        "which looks like organisation/name"
    )


def _inside(folder: Path) -> Path:
    """The model in a folder: the folder itself, or the one GGUF file in it."""
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelFileError(f"{folder} holds {len(ggufs)} GGUF files: give the path of one, such as {ggufs[0]}")
    if (folder / "adapter_config.json").is_file():
        raise ModelFileError(f"{folder} holds an adapter, not a model: merge it into its base model first")
    raise ModelFileError(f"{folder} has no config.json: give the folder of a model saved by `save_pretrained`")
