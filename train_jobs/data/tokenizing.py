"""From the parts of a corpus to its two token streams: what was done is kept, whatever ends it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from cluster.config.sections.data import DataConfig
from cluster.errors import ShoalError
from cluster.wording import counted, lasting
from train_jobs.data.documents import CorpusPart, document_of, held_out_of
from train_jobs.data.encoder import DocumentEncoder
from train_jobs.data.remaining import RemainingWork
from train_jobs.data.token_streams import Encoded, StreamWriter, token_type

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 256  # documents tokenized at once: bounds the memory, keeps the tokenizer's threads busy
LONG_S = 60.0
"""More than so much is worth other nodes' help."""
_encoder_of = lru_cache(maxsize=1)(DocumentEncoder)
"""All parts have the same tokenizer, and it takes a while to copy one."""

Tell = Callable[[str], None]
"""Takes a sentence about how far something is."""


Encode = Callable[[Sequence[CorpusPart], "PreTrainedTokenizerBase", int], Iterator[Encoded]]
"""Encodes the parts from one on, in their order."""


class LongWorkError(ShoalError):
    """It takes more than a minute here, and others could help; what was done is kept."""

    def __init__(self, rest_s: float) -> None:
        self.rest_s = rest_s
        super().__init__(f"tokenizing the rest takes about {lasting(rest_s)} on one machine")


def encode_here(
    parts: Sequence[CorpusPart], tokenizer: PreTrainedTokenizerBase, first: int
) -> Iterator[Encoded]:
    """Encode in this process, one part after another."""
    for index in range(first, len(parts)):
        yield from encode_part(index, parts[index], tokenizer)


def encode_part(index: int, part: CorpusPart, tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
    """The documents of one part, some at a time.

    Raises:
        RequestError: it cannot be read, or a conversation does not fit the tokenizer's template.
    """
    kind, end = token_type(len(tokenizer)), tokenizer.eos_token_id
    encoder = _encoder_of(tokenizer)
    documents = (document_of(name, value, held_out=False) for name, value in part.texts())
    batch = list(islice(documents, _BATCH))
    while True:
        following = list(islice(documents, _BATCH))
        encoded = []
        for document, tokens in zip(batch, encoder(batch), strict=True):
            ends = end is None or (document.chat is not None and tokens[-1:] == [end])
            encoded.append(np.asarray(tokens if ends else [*tokens, end], dtype=kind))
        lengths = np.asarray([len(each) for each in encoded], dtype=np.int64)
        yield Encoded(index, np.concatenate([np.empty(0, kind), *encoded]), lengths, not following)
        if not following:
            return
        batch = following


def digest_of_parts(parts: Iterable[CorpusPart]) -> str:
    """Of where they are and how large they are, without a look into them."""
    named = json.dumps([(part.name, part.rows, part.size) for part in parts])
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def write_streams(
    data: DataConfig,
    parts: Sequence[CorpusPart],
    tokenizer: PreTrainedTokenizerBase,
    writer: StreamWriter,
    encode: Encode,
    tell: Tell,
    *,
    hand_over: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Encode all parts that the writer has not yet.

    Args:
        tell: told again and again how far that is.
        hand_over: it ends where it takes long and others could help.

    Raises:
        LongWorkError: it is handed over.
        RequestError: a part cannot be read or encoded.
    """
    rows = [part.rows for part in parts]
    remaining = RemainingWork(clock)
    for encoded in encode(parts, tokenizer, writer.parts):
        assert encoded.part == writer.parts, "parts come in their order"
        apart = parts[encoded.part].apart
        places = writer.documents + np.arange(len(encoded.lengths))
        held_out = np.broadcast_to(held_out_of(data, places, apart=apart), places.shape)
        writer.add(encoded, held_out)
        remaining.at(sum(rows[: writer.parts]) + (0 if encoded.last else writer.of_part), sum(rows))
        so_far = f"tokenized {counted(writer.documents, 'document')}, {writer.tokens:,} tokens so far"
        tell(f"{so_far}{remaining.left}")
        left = len(parts) - writer.parts
        if hand_over and remaining.is_known and remaining.rest_s > LONG_S and left > 1:
            writer.keep()
            raise LongWorkError(remaining.rest_s)
