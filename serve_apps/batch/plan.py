"""Which shards an input has, what their files are called, and which are still to do: no Ray, no files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_SHARD_ROWS = 1000
"""Rows that a kill can cost at most, for each shard in flight."""
SHARDS_EACH = 8
"""A small input is cut finely enough for every replica to have about so many shards."""
_DIGITS = 5


@dataclass(frozen=True)
class InputFile:
    """One file of the input, as its footer describes it."""

    path: str
    size_bytes: int
    rows: int


@dataclass(frozen=True)
class Shard:
    """The rows `first_row` to `first_row + rows` of one file, done and written as a whole."""

    index: int
    path: str
    first_row: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """The shards of an input, in its order; the same files and sizes always give the same plan."""

    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def file_of(self, shard: Shard) -> str:
        """The name of a shard's output; names sort as the rows do."""
        digits = max(_DIGITS, len(str(len(self.shards) - 1)))
        return f"part-{shard.index:0{digits}d}.parquet"

    def done(self, names: Collection[str]) -> list[Shard]:
        """The shards whose files are among `names`."""
        return [shard for shard in self.shards if self.file_of(shard) in names]

    def to_do(self, names: Collection[str]) -> list[Shard]:
        """The shards whose files are not among `names`."""
        return [shard for shard in self.shards if self.file_of(shard) not in names]


def plan_shards(files: Sequence[InputFile], rows_per_shard: int) -> Plan:
    """Cut files into shards of `rows_per_shard` rows; the last of a file may have fewer."""
    shards: list[Shard] = []
    for file in files:
        for first in range(0, file.rows, rows_per_shard):
            rows = min(rows_per_shard, file.rows - first)
            shards.append(Shard(len(shards), file.path, first, rows))
    return Plan(tuple(shards))


def choose_rows_per_shard(rows: int, replicas: int, batch: int) -> int:
    """Rows of a shard where nobody says: a batch at least, and at most what a kill should cost."""
    share = math.ceil(rows / (replicas * SHARDS_EACH))
    return max(1, min(MAX_SHARD_ROWS, max(batch, share)))


def shards_at_once(rows_per_shard: int, rows_in_flight: int) -> int:
    """Shards that a replica has in hand so that its batch stays full while one of them ends."""
    return 1 + min(15, max(1, math.ceil(rows_in_flight / rows_per_shard)))


def digest(files: Sequence[InputFile]) -> str:
    """What tells one list of files from another: their names, sizes and rows."""
    facts = [(file.path, file.size_bytes, file.rows) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
