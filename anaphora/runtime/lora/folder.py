"""What a folder with an adapter shows before there is a model: that its files are there, and what its settings say.

Knows the two files that PEFT writes; must not know tensors or models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from anaphora.errors import AdapterFileError, UnsupportedAdapterError
from anaphora.runtime.lora.settings import AdapterSettings, parse_settings

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20


def check_folder(folder: str, *, max_rank: int) -> None:
    """Refuse early what no model could take. Raises AdapterFileError, UnsupportedAdapterError."""
    with errors_about(folder):
        read_settings(folder, (), max_rank=max_rank)


@contextmanager
def errors_about(folder: str) -> Iterator[None]:
    """Errors of the body say which folder they are about."""
    try:
        yield
    except (AdapterFileError, UnsupportedAdapterError) as error:
        raise type(error)(f"the adapter in {folder} cannot be used: {error}") from error


def read_settings(folder: str, paths: Sequence[str], *, max_rank: int) -> AdapterSettings:
    """What the configuration says of the layers at these paths, once it is known that weights lie beside it.

    Raises AdapterFileError, UnsupportedAdapterError.
    """
    path = Path(folder)
    if not os.path.isdir(path):
        raise AdapterFileError(f"there is no folder of that name: give one that holds {CONFIG_FILE}, {WEIGHTS_FILE}")
    try:
        text = read_file(path / CONFIG_FILE, _MAX_CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise AdapterFileError(f"{CONFIG_FILE} is not UTF-8: {error}") from error
    settings = parse_settings(text, paths)
    rank = max(settings.rank, *settings.rank_pattern.values(), 0)
    if rank > max_rank:
        raise UnsupportedAdapterError(
            f"its rank is {rank}, and max_lora_rank is {max_rank}: raise that, or train with a lower rank"
        )
    if not os.path.isfile(path / WEIGHTS_FILE):
        if os.path.exists(path / "adapter_model.bin"):
            raise UnsupportedAdapterError(
                f"adapter_model.bin is a pickle, which could run code: save the adapter as {WEIGHTS_FILE}"
            )
        raise AdapterFileError(f"there is no file {WEIGHTS_FILE}")
    return settings


def read_file(path: Path, largest: int) -> bytes:
    """A whole file of at most so many bytes. Raises AdapterFileError."""
    if not os.path.isfile(path):  # opening a pipe would wait for who writes to it
        raise AdapterFileError(f"there is no file {path.name}")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(largest + 1) if size <= largest else b""
    except OSError as error:
        raise AdapterFileError(f"{path.name} cannot be read: {error.strerror}") from error
    if size > largest or len(data) > largest:
        raise AdapterFileError(
            f"{path.name} has more than the {largest:,} bytes that an adapter of this model may have"
        )
    return data
