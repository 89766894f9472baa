"""Rows of Parquet files by index, a row group at a time: one file, many, a partitioned directory, any URI."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from cluster.errors import RequestError

_BROKEN = (OSError, pa.ArrowException)


@dataclass(frozen=True)
class RowGroup:
    """A part of a file that is read at once."""

    fragment: int
    """Index of the file, in the order of their paths."""
    index: int
    """Index within the file."""
    num_rows: int


class ParquetRows:
    """All rows of a data set; they count through the files in the order of their paths.

    Only footers are read at first. Row groups are read when a row of theirs is asked for; the last few stay.

    Args:
        source: a file, a directory (its partitions `name=value` are columns) or a URI of pyarrow.fs.
        columns: the columns that will be read.
        key: the config's key of the source, for messages.
        kept: row groups that stay in memory.

    Raises:
        RequestError: the source is not there or no Parquet, a file lacks one of the columns, or has it with
            another type than the first file.
    """

    def __init__(self, source: str, columns: Sequence[str], key: str = "data.source", kept: int = 16) -> None:
        self.source = source
        self.columns = list(columns)
        self.key = key
        self.kept = kept
        self._process: int | None = None
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self.schema = self._open()
        self.groups = [group for index in range(len(self.fragments)) for group in self._groups_of(index)]
        self.ends = np.cumsum([group.num_rows for group in self.groups], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def group_sizes(self) -> list[int]:
        return [group.num_rows for group in self.groups]

    def row(self, index: int) -> dict[str, Any]:
        """One row, as Python objects by column."""
        group = self._group_of(index)
        table, offset = self._table(group), self._offset(index, group)
        return {name: table.column(name)[offset].as_py() for name in self.columns}

    def walk(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, pa.Table]]:
        """Every row group in order (of some columns only), with the words for where it is."""
        for group in self.groups:
            yield self._place(group), self._read(group, columns or self.columns)

    def place_of(self, row: int) -> str:
        """`FILE, row group N, row M`, for messages."""
        group = self._group_of(row)
        return f"{self._place(self.groups[group])}, row {self._offset(row, group)}"

    def _place(self, group: RowGroup) -> str:
        return f"{self.fragments[group.fragment].path} ({self.key}), row group {group.index}"

    def _group_of(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return int(np.searchsorted(self.ends, row, side="right"))

    def _offset(self, row: int, group: int) -> int:
        """Where in its group a row is."""
        return row - (int(self.ends[group]) - self.groups[group].num_rows)

    def _open(self) -> pa.Schema:
        """Find the files; each process does so for itself: clients of object stores do not survive a fork."""
        try:
            if "://" in self.source:
                filesystem, path = fs.FileSystem.from_uri(self.source)
            else:
                filesystem, path = fs.LocalFileSystem(), self.source
            found = ds.dataset(
                path,
                filesystem=filesystem,
                format="parquet",
                partitioning="hive",
                exclude_invalid_files=False,
            )
            schema = found.schema
            self.fragments = sorted(found.get_fragments(), key=lambda item: item.path)
        except (*_BROKEN, ValueError) as error:
            raise RequestError(f"{self.key} {self.source!r} cannot be read as Parquet: {error}") from error
        if not self.fragments:
            raise RequestError(f"{self.key} {self.source!r} holds no Parquet file")
        for name in self.columns:
            if name not in schema.names:
                has = ", ".join(schema.names)
                raise RequestError(f"{self.key} {self.source!r} has no column {name!r}; it has {has}")
        self._process = os.getpid()
        return schema

    def _groups_of(self, index: int) -> list[RowGroup]:
        fragment = self.fragments[index]
        try:
            own = fragment.physical_schema
            sizes = [group.num_rows for group in fragment.row_groups]
        except _BROKEN as error:
            raise RequestError(f"{fragment.path} ({self.key}) is no whole Parquet file: {error}") from error
        partitions = ds.get_partition_keys(fragment.partition_expression)
        for name in self.columns:
            expected = self.schema.field(name).type
            if name in partitions:
                continue
            if name not in own.names:
                raise RequestError(f"{fragment.path} ({self.key}) has no column {name!r}, which others have")
            if own.field(name).type != expected:
                raise RequestError(
                    f"{fragment.path} ({self.key}): column {name!r} holds {own.field(name).type}; "
                    f"in {self.fragments[0].path} it holds {expected}"
                )
        return [RowGroup(index, each, size) for each, size in enumerate(sizes)]

    def _table(self, group: int) -> pa.Table:
        if group in self._tables:
            self._tables.move_to_end(group)
            return self._tables[group]
        self._tables[group] = table = self._read(self.groups[group], self.columns)
        while len(self._tables) > self.kept:
            self._tables.popitem(last=False)
        return table

    def _read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        if self._process != os.getpid():
            self._open()
        fragment = self.fragments[group.fragment]
        try:
            part = fragment.subset(row_group_ids=[group.index], schema=self.schema)
            return part.to_table(schema=self.schema, columns=list(columns), use_threads=False)
        except _BROKEN as error:
            if len(columns) > 1:
                for name in columns:  # the one that is broken says so
                    self._read(group, [name])
            names = ", ".join(repr(name) for name in columns)
            raise RequestError(f"{self._place(group)}: column {names} cannot be read: {error}") from error
