"""One forward pass as plain data: what every rank has to know to run it, and its form on the wire."""

from __future__ import annotations

from collections.abc import Sequence as Ints
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What a message asks of the ranks."""

    STEP = 0
    IDLE = 1
    """Nothing to do; says that rank 0 lives and finds out whether the others do."""
    STOP = 2
    LOAD = 3
    """Load other weights; the model's directory follows."""
    PARK = 4
    """Give up the KV cache, and the device but for what stays of a process that has computed there."""
    WAKE = 5
    """Take both again."""


class Want(IntEnum):
    """What is wanted of a row besides its keys and values."""

    NOTHING = 0
    """More of its tokens come in later steps."""
    LOGITS = 1
    """Of the token that follows."""
    HIDDEN = 2
    """The sum of its tokens' last hidden states."""


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one sequence.

    The ranks keep the table of blocks of each slot; a row says how it changes: `keep` of it stay, `blocks`
    follow. `tokens` are those at the positions `start`, `start + 1`, …, and their blocks are in the table.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    keep: int
    blocks: tuple[int, ...]
    want: Want = Want.LOGITS
    scored: int = 0
    """Of so many of its tokens, the first ones, the logits of the next are wanted: it is the prompt's."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over the new tokens of all its rows."""

    rows: tuple[Row, ...]


_HEADER = 3
_ROW = 7


def frame_size(max_batch: int) -> int:
    """Integers that hold the message of any decode step, so that it needs one broadcast of a known size.

    Each row of such a step has one token and at most one new block.
    """
    return _HEADER + max_batch * (_ROW + 2)


def encode(kind: Kind, step: Step | None = None, text: str = "") -> list[int]:
    """The message as integers: total, kind, number of rows (of bytes, where there is a text); rows."""
    if step is None:
        content = text.encode()
        return [_HEADER + len(content), kind, len(content), *content]
    message = [0, kind, len(step.rows)]
    for row in step.rows:
        message += (row.slot, row.start, len(row.tokens), row.keep, len(row.blocks), row.want, row.scored)
    for row in step.rows:
        message += row.tokens
        message += row.blocks
    message[0] = len(message)
    return message


def decode(message: Ints[int]) -> tuple[Kind, Step | None, str]:
    """The inverse of `encode`; what lies beyond the total is padding."""
    total, kind, count = message[:_HEADER]
    if kind != Kind.STEP:
        return Kind(kind), None, bytes(message[_HEADER : _HEADER + count]).decode()
    at = _HEADER + _ROW * count
    rows = []
    for head in range(_HEADER, at, _ROW):
        slot, start, num_tokens, keep, num_blocks, want, scored = message[head : head + _ROW]
        end = at + num_tokens
        blocks = tuple(message[end : end + num_blocks])
        rows.append(Row(slot, start, tuple(message[at:end]), keep, blocks, Want(want), scored))
        at = end + num_blocks
    if at != total:
        raise ValueError(f"the message says it is {total} integers long, but holds {at}")
    return Kind.STEP, Step(tuple(rows)), ""
