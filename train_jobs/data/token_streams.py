"""A corpus as two token streams: how they are read, and how they are written as they come."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cluster.files.backend import MissingError
from cluster.files.storage import Storage
from cluster.wording import counted
from train_jobs.data.growing_array import ARRAY, GrowingArray, length_of

FACTS = "streams.json"
TOKENIZER = "tokenizer"
"""Names in the directory of the prepared data."""
STAGED = ".new"
"""In the directory: what is not whole yet."""
_SO_FAR = "so_far.json"
_KEEP_S = 5.0
"""Seconds between two notes of how far it is: so much at most is done again after a kill."""


class TokenStream(NamedTuple):
    """One part of a corpus: all its tokens, and where each document begins (both of one dimension)."""

    tokens: np.ndarray
    starts: np.ndarray


class TokenStreams:
    """A job's corpus as two token streams (training, held out) in one directory, memory-mapped.

    Files: `train.npy`, `held_out.npy` (tokens), `train_starts.npy`, `held_out_starts.npy` (documents),
    `tokenizer/` (Hugging Face format) and `streams.json`, written last: with what they were made of. The
    arrays are opened when they are asked for.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        facts: dict[str, Any] = json.loads((directory / FACTS).read_text())
        self.vocab_size: int = facts["vocab_size"]
        self.content: str = facts.get("content", "")
        """A digest of the training tokens."""

    @cached_property
    def train(self) -> TokenStream:
        return self._open("train")

    @cached_property
    def held_out(self) -> TokenStream:
        return self._open("held_out")

    def _open(self, part: str) -> TokenStream:
        return TokenStream(
            np.load(self.directory / f"{part}{ARRAY}", mmap_mode="r"),
            np.load(self.directory / f"{part}_starts{ARRAY}", mmap_mode="r"),
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
    """Writes both streams as they come: a corpus need not fit into memory, nor on a disk of ours.

    Every few seconds it notes how far it is; who opens the same directory for the same work goes on there.

    Files, until `put_together`: in `.new/` pieces of each array, named after their first element, and
    `so_far.json`.

    Attributes:
        parts: how many parts are whole.
        of_part: documents there are of the next one.

    Args:
        place: where the streams are to be.
        kind: of a token.
        origin: what the streams follow from.
    """

    def __init__(self, place: Storage, kind: type[np.generic], origin: Mapping[str, Any]) -> None:
        self._staged = place.child(STAGED)
        self._origin = dict(origin)
        self._streams = [_Stream(self._staged, part, kind) for part in ("train", "held_out")]
        self.parts = self.of_part = 0
        self._whole: dict[str, Any] = {}
        self._kept_at = -math.inf
        known = _noted(self._staged)
        if known.get("origin") != self._origin or not self._go_on(known):
            self._go_on({"parts": 0, "streams": [(0, 0), (0, 0)]})
        self._end_part()
        self.keep()

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

    def _go_on(self, known: Mapping[str, Any]) -> bool:
        """Go on behind what is noted; whether all of that is there."""
        self.parts = known["parts"]
        sizes = zip(self._streams, known["streams"], strict=True)
        return all(stream.open(*size) for stream, size in sizes)

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
        self._note({})

    def seal(self, facts: Mapping[str, Any]) -> None:
        """Note that all is written: what is left is to put it together.

        Args:
            facts: what `streams.json` is to say.
        """
        self._note({"facts": facts, "kinds": [stream.kind for stream in self._streams]})

    def _note(self, more: Mapping[str, Any]) -> None:
        for stream in self._streams:
            stream.flush()
        note = {"origin": self._origin, **self._whole, **more}
        self._staged.write_bytes(_SO_FAR, json.dumps(note).encode())
        self._kept_at = time.monotonic()

    def forget(self) -> None:
        """Let nobody go on from here."""
        self._staged.delete(_SO_FAR)


def put_together(place: Storage, tell: Callable[[str], None]) -> bool:
    """Make the streams of pieces that are sealed; whether there were any.

    Whoever is cut off in it leaves pieces that are sealed: nothing that only they hold is lost.

    Args:
        tell: told what is done.
    """
    staged = place.child(STAGED)
    note = _noted(staged)
    if "facts" not in note:
        return False
    streams = [_Stream(staged, *each) for each in zip(("train", "held_out"), note["kinds"], strict=True)]
    if not all(stream.has(*size) for stream, size in zip(streams, note["streams"], strict=True)):
        staged.delete(_SO_FAR)
        return False
    known = read_facts(place)
    if known is None or known.get("made_of") != note["facts"]["made_of"]:
        tell(f"putting {counted(sum(tokens for _, tokens in note['streams']), 'token')} together")
        place.delete(FACTS)
        content, _ = (
            stream.put_together(place, *size) for stream, size in zip(streams, note["streams"], strict=True)
        )
        place.delete_dir(TOKENIZER)
        place.copy_dir(staged.child(TOKENIZER), TOKENIZER)
        place.write_bytes(FACTS, json.dumps({**note["facts"], "content": content}).encode())
    staged.delete(_SO_FAR)
    place.delete_dir(STAGED)
    return True


def read_facts(place: Storage) -> dict[str, Any] | None:
    """What is known of the streams; None where they are not there."""
    try:
        facts: dict[str, Any] = json.loads(place.read_bytes(FACTS))
    except MissingError:
        return None
    return facts


def sizes_of(place: Storage) -> tuple[int, int]:
    """How many tokens there are to train on, and held out, of streams that are there."""
    train, held_out = (length_of(place, part) for part in ("train", "held_out"))
    return train, held_out


def has_begun(place: Storage, origin: Mapping[str, Any]) -> bool:
    """Whether somebody has begun streams there that follow from the same."""
    return _noted(place.child(STAGED)).get("origin") == origin


def _noted(staged: Storage) -> dict[str, Any]:
    try:
        note: dict[str, Any] = json.loads(staged.read_bytes(_SO_FAR))
    except (MissingError, ValueError):
        return {}
    return note


def token_type(vocab_size: int) -> type[np.generic]:
    """What tokens are kept as."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class _Stream:
    """One stream: its tokens, and where its documents begin.

    Args:
        kind: of a token.
    """

    def __init__(self, staged: Storage, name: str, kind: Any) -> None:
        self.kind: str = np.dtype(kind).str
        self._tokens = GrowingArray(staged, name, np.dtype(kind))
        self._starts = GrowingArray(staged, f"{name}_starts", np.dtype(np.int64))

    @property
    def documents(self) -> int:
        return self._starts.length

    @property
    def tokens(self) -> int:
        return self._tokens.length

    def open(self, documents: int, tokens: int) -> bool:
        """Go on behind so much; whether it is there."""
        return self._starts.open(documents) and self._tokens.open(tokens)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self._starts.add(self.tokens + np.cumsum(lengths) - lengths)
        self._tokens.add(tokens)

    def flush(self) -> None:
        self._tokens.flush()
        self._starts.flush()

    def has(self, documents: int, tokens: int) -> bool:
        """Whether it has just so much."""
        return self._starts.has(documents) and self._tokens.has(tokens)

    def put_together(self, place: Storage, documents: int, tokens: int) -> str:
        """Write the arrays; returns a digest of the tokens."""
        self._starts.put_together(place, documents)
        return self._tokens.put_together(place, tokens)
