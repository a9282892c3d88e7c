"""Converted models in the cache folder: where one lies, whether it is whole, and what it was recorded to be.

Reads a small file beside the weights; imports no tensor library, so that listing models is quick.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IDENTITY_FILE = "identity.json"
FORMAT = 1  # raised when the conversion gives other files for the same GGUF: older folders are then made anew


def converted_folder(cache_dir: Path, stem: str, gguf_sha256: str) -> Path:
    """Where the conversion of the GGUF file with this digest lies, or would lie."""
    return cache_dir / "models" / f"{stem}-{gguf_sha256[:12]}"


def is_converted(folder: Path) -> bool:
    """Whether this folder holds a whole conversion of the present format."""
    return read_identity(folder) is not None


def read_identity(folder: Path) -> dict[str, Any] | None:
    """What the conversion wrote beside the weights; None if the folder is not of this format, or incomplete."""
    try:
        content = json.loads((folder / IDENTITY_FILE).read_text())
        whole = (
            content["format"] == FORMAT
            and all((folder / name).stat().st_size == entry["bytes"] for name, entry in content["files"].items())
            and all((folder / name).stat().st_size == size for name, size in content.get("others", {}).items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if whole and content["files"] and (folder / "config.json").is_file() else None


def recorded_digests(folder: Path) -> dict[str, str] | None:
    """File name -> digest of its bytes as recorded, if no file was touched since; else None."""
    content = read_identity(folder)
    if content is None:
        return None
    files = content["files"].items()
    if any((folder / name).stat().st_mtime_ns != entry["mtime_ns"] for name, entry in files):
        return None
    return {name: entry["sha256"] for name, entry in files}
