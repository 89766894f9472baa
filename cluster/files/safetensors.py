"""What tensors lie in a model's directory, from the headers of its safetensors files.

Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
LONGEST_HEADER = 100_000_000
"""Bytes; what the format allows."""
_LENGTH_BYTES = 8


class HeaderError(Exception):
    """A file cannot be read as safetensors; the message names it."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    dtype: str
    """As the format calls it: F32, BF16, I64, …"""
    shape: tuple[int, ...]
    num_bytes: int
    """What it takes in the file."""

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a model by name; empty where the directory holds no safetensors.

    Only the files that a loader would read count: those of the index where there is one, the whole model's
    file otherwise. Copies beside them (another format, an adapter) do not.

    Raises:
        HeaderError: a file is missing, or is no safetensors file.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(directory):
        found.update(_read_header(file))
    return found


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_bytes())["weight_map"].values()
            return [directory / name for name in sorted(set(names))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise HeaderError(f"{index} cannot be read ({type(error).__name__})") from error
    whole = directory / WHOLE
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with open(file, "rb") as content:
            length = int.from_bytes(content.read(_LENGTH_BYTES), "little")
            if not 0 < length <= LONGEST_HEADER:
                raise HeaderError(f"{file} is no safetensors file")
            header: Any = json.loads(content.read(length))
        return {name: _tensor(entry) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HeaderError(f"{file} is no safetensors file ({type(error).__name__})") from error


def _tensor(entry: Any) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(str(entry["dtype"]), tuple(int(length) for length in entry["shape"]), end - begin)
