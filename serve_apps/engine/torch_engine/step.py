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


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `length` cached tokens of row `source` to row `target`, before the forward pass."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over the rows `first_row`, `first_row + 1`, …

    `tokens[i]` are the new tokens of row `first_row + i`, the first of them at position `starts[i]`. Either
    all rows are prompts (`starts` all 0), or all rows add one token to what is cached (decode, `first_row`
    0).
    """

    moves: tuple[Move, ...]
    first_row: int
    tokens: tuple[Ints[int], ...]
    starts: tuple[int, ...]

    @property
    def is_prefill(self) -> bool:
        return self.starts[0] == 0


def frame_size(max_batch: int) -> int:
    """Integers that hold the message of any decode step, so that it needs one broadcast of a known size."""
    return _HEADER + 3 * max_batch + 3 * max_batch


_HEADER = 5


def encode(kind: Kind, step: Step | None = None) -> list[int]:
    """The message as integers: total, kind, first row, numbers of moves and rows; moves; rows; tokens."""
    if step is None:
        return [_HEADER, kind, 0, 0, 0]
    message = [0, kind, step.first_row, len(step.moves), len(step.tokens)]
    for move in step.moves:
        message += (move.source, move.target, move.length)
    message += step.starts
    message += map(len, step.tokens)
    for tokens in step.tokens:
        message += tokens
    message[0] = len(message)
    return message


def decode(message: Ints[int]) -> tuple[Kind, Step | None]:
    """The inverse of `encode`; what lies beyond the total is padding."""
    total, kind, first_row, num_moves, num_rows = message[:_HEADER]
    if kind != Kind.STEP:
        return Kind(kind), None
    at = _HEADER
    moves = tuple(Move(*message[i : i + 3]) for i in range(at, at + 3 * num_moves, 3))
    at += 3 * num_moves
    starts = tuple(message[at : at + num_rows])
    lengths = message[at + num_rows : at + 2 * num_rows]
    at += 2 * num_rows
    tokens = []
    for length in lengths:
        tokens.append(tuple(message[at : at + length]))
        at += length
    if at != total:
        raise ValueError(f"the message says it is {total} integers long, but holds {at}")
    return Kind.STEP, Step(moves, first_row, tuple(tokens), starts)
