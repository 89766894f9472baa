"""Rows of Parquet files by index, a row group at a time: one file, many, a partitioned directory, any URI."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from cluster.config.sections.data import DataConfig
from cluster.errors import RequestError
from cluster.files.parquet import ParquetFiles, is_chat, wanted_columns


@dataclass(frozen=True)
class RowGroup:
    """A part of a file that is read at once."""

    file: int
    """Index of the file, in the order of their paths."""
    index: int
    """Index within the file."""
    num_rows: int
    size: int
    """In bytes, not compressed."""


class ParquetRows:
    """All rows of a data set; they count through the files in the order of their paths.

    Only footers are read at first. Row groups are read when a row of theirs is asked for; the last few stay.

    Args:
        source, columns, key: as of ParquetFiles.
        kept: row groups that stay in memory.
        read_as: types that columns are read with, where files may have them stored in several ways.

    Raises:
        RequestError: the source is not there or no Parquet, a file lacks one of the columns, or has it with
            another type than the first file.
    """

    def __init__(
        self,
        source: str,
        columns: Sequence[str],
        key: str = "data.source",
        kept: int = 16,
        read_as: Mapping[str, pa.DataType] | None = None,
    ) -> None:
        self.source = source
        self.read_as = read_as or {}
        self.columns = list(columns)
        self.key = key
        self.kept = kept
        self._process: int | None = None
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._open()
        self.groups = [
            RowGroup(file, index, rows, size)
            for file in range(len(self.files.fragments))
            for index, (rows, size) in enumerate(
                zip(self.files.group_sizes(file), self.files.group_bytes(file), strict=True)
            )
        ]
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
        for index in range(len(self.groups)):
            yield self.read_group(index, columns)

    def read_group(self, index: int, columns: Sequence[str] | None = None) -> tuple[str, pa.Table]:
        """One row group, as `walk` has it."""
        return self.place_of_group(index), self._read(self.groups[index], columns or self.columns)

    def place_of_group(self, index: int) -> str:
        """`FILE, row group N`, for messages."""
        return self._place(self.groups[index])

    def place_of(self, row: int) -> str:
        """`FILE, row group N, row M`, for messages."""
        group = self._group_of(row)
        return f"{self._place(self.groups[group])}, row {self._offset(row, group)}"

    def _kind(self, name: str, stored: pa.DataType) -> pa.DataType | None:
        """What a column is cast to; None where it stays as it is stored."""
        wanted = self.read_as.get(name)
        if wanted is None or is_chat(self.files.kind(name)):
            wanted = self.files.kind(name)
        return None if wanted == stored else wanted

    def _place(self, group: RowGroup) -> str:
        return f"{self.files.place(group.file)}, row group {group.index}"

    def _group_of(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return int(np.searchsorted(self.ends, row, side="right"))

    def _offset(self, row: int, group: int) -> int:
        """Where in its group a row is."""
        return row - (int(self.ends[group]) - self.groups[group].num_rows)

    def _open(self) -> None:
        """Find the files; each process does so for itself: clients of object stores do not survive a fork."""
        self.files = ParquetFiles(self.source, self.columns, self.key)
        self._process = os.getpid()

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

        def read() -> pa.Table:
            schema = self.files.schema_of(group.file)
            part = self.files.fragments[group.file].subset(row_group_ids=[group.index], schema=schema)
            fields = {
                name: ds.field(name) if name in schema.names else ds.field(*name.split("."))
                for name in columns
            }
            table = part.to_table(schema=schema, columns=fields, use_threads=False)
            for index, name in enumerate(columns):
                if (kind := self._kind(name, table.column(name).type)) is not None:
                    table = table.set_column(index, name, table.column(name).cast(kind))
            return table

        def sentence(error: Exception) -> str:
            if len(columns) > 1:
                for name in columns:  # the one that is broken says so
                    self._read(group, [name])
            names = ", ".join(repr(name) for name in columns)
            return f"{self._place(group)}: column {names} cannot be read: {error}"

        return self.files.read(group.file, read, sentence)


def open_rows(task: str, data: DataConfig, source: str, key: str, kept: int = 16) -> ParquetRows:
    """The rows of a source, with the columns that a built-in task reads, each of the type it has to have.

    Raises:
        RequestError: as ParquetRows; or a column is of another type.
    """
    wanted = wanted_columns(task, data)
    read_as = {column.name: column.read_as for column in wanted if column.read_as is not None}
    rows = ParquetRows(source, [column.name for column in wanted], key, kept, read_as)
    for column in wanted:
        problem = rows.files.misfit(column)
        if problem is not None:
            raise RequestError(problem)
    return rows
