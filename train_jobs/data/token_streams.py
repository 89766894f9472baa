"""A corpus as two token streams on disk: how they are read, and how they are written as they come."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

FACTS = "streams.json"
TOKENIZER = "tokenizer"
"""Names in the directory of the prepared data."""
_SO_FAR = "so_far.json"
_KEEP_S = 5.0
"""Seconds between two notes of how far it is: so much at most is done again after a kill."""
_BLOCK = 1 << 22


class TokenStream(NamedTuple):
    """One part of a corpus: all its tokens, and where each document begins (both of one dimension)."""

    tokens: np.ndarray
    starts: np.ndarray


class TokenStreams:
    """A job's corpus as two token streams (training, held out) in one directory, memory-mapped.

    Files: `train.npy`, `held_out.npy` (tokens), `train_starts.npy`, `held_out_starts.npy` (documents),
    `tokenizer/` (Hugging Face format) and `streams.json`, written last: with what they were made of.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        facts: dict[str, Any] = json.loads((directory / FACTS).read_text())
        self.vocab_size: int = facts["vocab_size"]
        self.content: str = facts.get("content", "")
        """A digest of the training tokens."""
        self.train = self._open("train")
        self.held_out = self._open("held_out")

    def _open(self, part: str) -> TokenStream:
        return TokenStream(
            np.load(self.directory / f"{part}.npy", mmap_mode="r"),
            np.load(self.directory / f"{part}_starts.npy", mmap_mode="r"),
        )

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory / TOKENIZER


class Encoded(NamedTuple):
    """Some documents of a part, in their order.

    Attributes:
        part: its index.
        tokens: those of all documents, one after another; each with the end of the text.
        lengths: how many tokens each document has.
        last: the part ends here.
    """

    part: int
    tokens: np.ndarray
    lengths: np.ndarray
    last: bool


class StreamWriter:
    """Writes both streams as they come: a corpus need not fit into memory.

    Every few seconds it notes how far it is; who opens the same directory for the same work goes on there.

    Files, until `complete`: `train.raw`, `held_out.raw` (tokens), `train_starts.raw`, `held_out_starts.raw`
    (int64) and `so_far.json`.

    Attributes:
        parts: how many parts are whole.
        of_part: documents there are of the next one.

    Args:
        kind: of a token.
        origin: what the streams follow from.
    """

    def __init__(self, directory: Path, kind: type[np.generic], origin: Mapping[str, Any]) -> None:
        self._directory = directory
        self._origin = dict(origin)
        self._streams = [_Stream(directory, part, kind) for part in ("train", "held_out")]
        self.parts = self.of_part = 0
        self._whole: dict[str, Any] = {}
        self._kept_at = -math.inf

    @property
    def documents(self) -> int:
        return sum(stream.documents for stream in self._streams)

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many tokens there are to train on, and held out."""
        train, held_out = self._streams
        return train.tokens, held_out.tokens

    def __enter__(self) -> StreamWriter:
        known = _noted(self._directory, self._origin) or {}
        sizes = known.get("streams", [(0, 0), (0, 0)])
        if all(stream.has(*size) for stream, size in zip(self._streams, sizes, strict=True)):
            self.parts = known.get("parts", 0)
        else:
            sizes = [(0, 0), (0, 0)]
        for stream, size in zip(self._streams, sizes, strict=True):
            stream.open(*size)
        self._end_part()
        self.keep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.close()

    def add(self, encoded: Encoded, held_out: np.ndarray) -> None:
        """Append documents to their streams.

        Args:
            held_out: of each document, whether it is.
        """
        for stream, own in zip(self._streams, (~held_out, held_out), strict=True):
            stream.add(encoded.tokens[np.repeat(own, encoded.lengths)], encoded.lengths[own])
        self.of_part += len(encoded.lengths)
        if encoded.last:
            self.parts += 1
            self._end_part()
        if time.monotonic() - self._kept_at >= _KEEP_S:
            self.keep()

    def _end_part(self) -> None:
        self.of_part = 0
        sizes = [(stream.documents, stream.tokens) for stream in self._streams]
        self._whole = {"parts": self.parts, "streams": sizes}

    def keep(self) -> None:
        """Note how far it is: no part that is whole is done again."""
        for stream in self._streams:
            stream.flush()
        note = self._directory / _SO_FAR
        new = note.with_suffix(".new")
        new.write_text(json.dumps({"origin": self._origin, **self._whole}))
        new.rename(note)
        self._kept_at = time.monotonic()

    def complete(self) -> str:
        """Write the streams as arrays; returns a digest of the training tokens."""
        self.keep()  # this may take its time
        digest, _ = (stream.complete() for stream in self._streams)
        return digest

    def forget(self) -> None:
        """Let nobody go on from here."""
        (self._directory / _SO_FAR).unlink()


def clear(directory: Path) -> None:
    """Delete what only served to go on; all else is there."""
    for path in (directory / _SO_FAR, *directory.glob("*.raw")):
        path.unlink(missing_ok=True)


def has_begun(directory: Path, origin: Mapping[str, Any]) -> bool:
    """Whether somebody has begun streams there that follow from the same."""
    return _noted(directory, origin) is not None


def _noted(directory: Path, origin: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        note: dict[str, Any] = json.loads((directory / _SO_FAR).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return note if note.get("origin") == origin else None


def token_type(vocab_size: int) -> type[np.generic]:
    """What tokens are kept as."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class _Stream:
    """One stream: its tokens, and where its documents begin."""

    def __init__(self, directory: Path, name: str, kind: type[np.generic]) -> None:
        self._arrays = directory / f"{name}.npy", directory / f"{name}_starts.npy"
        self._raws = directory / f"{name}.raw", directory / f"{name}_starts.raw"
        self._kinds = np.dtype(kind), np.dtype(np.int64)
        self.documents = self.tokens = 0

    def has(self, documents: int, tokens: int) -> bool:
        """Whether so much of it is there."""
        return all(
            count == 0 or (raw.exists() and raw.stat().st_size >= count * kind.itemsize)
            for raw, kind, count in zip(self._raws, self._kinds, (tokens, documents), strict=True)
        )

    def open(self, documents: int, tokens: int) -> None:
        """Go on behind so much."""
        self.documents, self.tokens = documents, tokens
        self._files = []
        for raw, kind, count in zip(self._raws, self._kinds, (tokens, documents), strict=True):
            file = raw.open("ab")
            file.truncate(count * kind.itemsize)
            self._files.append(file)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        starts = self.tokens + np.cumsum(lengths) - lengths
        for file, kind, array in zip(self._files, self._kinds, (tokens, starts), strict=True):
            file.write(array.astype(kind, copy=False).tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def flush(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())  # the note that follows must not outlive what it vouches for

    def close(self) -> None:
        for file in self._files:
            file.close()

    def complete(self) -> str:
        """Write the arrays; returns a digest of the tokens."""
        self.close()
        digest = hashlib.blake2b(digest_size=16)
        lengths = self.tokens, self.documents
        for raw, kind, length, array in zip(self._raws, self._kinds, lengths, self._arrays, strict=True):
            target = np.lib.format.open_memmap(array, mode="w+", dtype=kind, shape=(length,))
            with raw.open("rb") as file:
                for first in range(0, length, _BLOCK):
                    read = file.read(_BLOCK * kind.itemsize)
                    target[first : first + _BLOCK] = np.frombuffer(read, dtype=kind)
                    if array is self._arrays[0]:
                        digest.update(read)
            target.flush()
        return digest.hexdigest()
