"""Reads a GGUF file's table of contents, to say in a millisecond whether the file is whole.

The `gguf` package reads a file's every word (15 s for a vocabulary of 262,144); this steps over arrays.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Knows nothing of models.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from anaphora.errors import ModelFileError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: strings and numbers; arrays are left out. num_parameters: elements of all tensors."""

    metadata: dict[str, str | int | float | bool]
    num_parameters: int


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def numbers(self, fmt: str) -> tuple[int | float | bool, ...]:
        values = struct.unpack_from(f"<{fmt}", self.data, self.position)
        self.position += struct.calcsize(f"<{fmt}")
        return values

    def integer(self, fmt: str) -> int:
        return int(self.numbers(fmt)[0])

    def string(self) -> str:
        length = self.integer("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise EOFError
        return self.data[start : self.position].decode("utf-8")

    def value(self, kind: int) -> str | int | float | bool | None:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(_SCALARS[kind])[0]
        element, count = self.integer("I"), self.integer("Q")
        if element in _SCALARS:
            self.position += struct.calcsize(f"<{_SCALARS[element]}") * count
        else:
            for _ in range(count):
                self.value(element)
        return None


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header and check that the file holds every tensor in full. Raises ModelFileError."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelFileError(f"{path} is not a GGUF file: give a .gguf file, or a folder with config.json")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(data, path)
        except (struct.error, EOFError, KeyError, ValueError, OverflowError, RecursionError) as error:
            raise ModelFileError(f"the header of {path} is broken or cut off: get the file again") from error


def _read(data: mmap.mmap, path: Path) -> GgufHeader:
    cursor = _Cursor(data)
    cursor.position = 4
    version = cursor.integer("I")
    if version not in (2, 3):
        raise ModelFileError(f"{path} is GGUF version {version}; versions 2 and 3 can be read: convert it anew")
    num_tensors, num_entries = cursor.integer("Q"), cursor.integer("Q")
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        value = cursor.value(cursor.integer("I"))
        if value is not None:
            metadata[key] = value
    num_parameters = last_byte = 0
    for _ in range(num_tensors):
        cursor.string()
        elements = prod(int(size) for size in cursor.numbers(f"{cursor.integer('I')}Q"))
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(cursor.integer("I"))]
        last_byte = max(last_byte, cursor.integer("Q") + elements // block_elements * block_bytes)
        num_parameters += elements
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    if alignment < 1:
        raise ModelFileError(f"{path} is broken: its alignment is {alignment}; get the file again")
    needed = -(-cursor.position // alignment) * alignment + last_byte
    if len(data) < needed:
        raise ModelFileError(f"{path} is cut off: it has {len(data)} bytes and needs {needed}; get the file again")
    if not num_tensors:
        raise ModelFileError(f"{path} holds no weights (a vocabulary only?): give a model file")
    return GgufHeader(metadata, num_parameters)
