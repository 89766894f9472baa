"""The input: Parquet files whose rows hold prompts; checked before anything starts, read by shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
from pyarrow import fs

from cluster.errors import RequestError
from cluster.files.parquet import ParquetFiles
from cluster.files.storage import Storage
from serve_apps.batch.plan import InputFile, Shard
from serve_apps.batch.rows import RESULTS

_READERS = 16
"""Footers that are read at once; on an object store each takes a round trip."""
_BATCH_ROWS = 1024

Check = Callable[[pa.DataType], bool]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_prompt(kind: pa.DataType) -> bool:
    return _is_text(kind) or (_is_list(kind) and pa.types.is_integer(kind.value_type))


def _is_messages(kind: pa.DataType) -> bool:
    return _is_list(kind) and pa.types.is_struct(kind.value_type)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_stop(kind: pa.DataType) -> bool:
    return _is_text(kind) or (_is_list(kind) and _is_text(kind.value_type))


_WHOLE: tuple[Check, str] = (pa.types.is_integer, "whole numbers")
_NUMBER: tuple[Check, str] = (_is_number, "numbers")
COLUMNS: dict[str, tuple[Check, str]] = {
    "prompt": (_is_prompt, "text or lists of token ids"),
    "messages": (_is_messages, "lists of {role, content}"),
    "max_tokens": _WHOLE,
    "min_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "min_p": _NUMBER,
    "seed": _WHOLE,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "stop": (_is_stop, "text or lists of text"),
}
"""The columns that mean something: what they hold, as a check of the type and in words."""


class Source:
    """The files of an input, and their rows.

    Args:
        location: a file, a directory or a URI of pyarrow.fs.

    Raises:
        RequestError: it cannot be read as Parquet.

    Attributes:
        location: the absolute path, or the URI.
        schema: that of all files.
    """

    def __init__(self, location: str) -> None:
        self.location = Storage(location).location
        self._files = ParquetFiles(self.location, [], "--input")
        self.schema: pa.Schema = self._files.schema
        self._files.columns = list(self.schema.names)
        self._by_path = {fragment.path: number for number, fragment in enumerate(self._files.fragments)}

    def check(self) -> list[InputFile]:
        """Read the footers and return the files, in order.

        Raises:
            RequestError: the columns are not what they should be, a file is broken or has other columns than
                the first, or there is no row.
        """
        self._check_columns()
        with ThreadPoolExecutor(_READERS) as pool:
            files = list(pool.map(self._file, range(len(self._files.fragments))))
        if not sum(file.rows for file in files):
            raise RequestError(f"--input {self.location!r} has no rows")
        return files

    def read(self, shard: Shard) -> pa.Table:
        """The rows of a shard, all columns.

        Raises:
            RequestError: the file is not there any more, or not whole.
            StorageError: it cannot be read now.
        """
        number = self._by_path.get(shard.path)
        if number is None:
            raise RequestError(f"{shard.path} is not in the input {self.location} any more")
        sizes = self._files.group_sizes(number)
        groups, skipped, passed = [], 0, 0
        for index, size in enumerate(sizes):
            if passed + size <= shard.first_row:
                skipped += size
            elif passed < shard.first_row + shard.rows:
                groups.append(index)
            passed += size
        table = self._files.read(
            number,
            lambda: self._slice(number, groups, shard.first_row - skipped, shard.rows),
            lambda error: f"{self._files.place(number)} cannot be read: {error}",
        )
        if table.num_rows != shard.rows:
            raise RequestError(f"{self._files.place(number)} has other rows than when the run began")
        return table

    def _slice(self, number: int, groups: list[int], first: int, rows: int) -> pa.Table:
        """Rows of some row groups; no more of them is held than that."""
        part = self._files.fragments[number].subset(row_group_ids=groups, schema=self.schema)
        kept = list(_window(part.to_batches(schema=self.schema, batch_size=_BATCH_ROWS), first, rows))
        return pa.Table.from_batches(kept, schema=self.schema)

    def _check_columns(self) -> None:
        names = self.schema.names
        named = f"--input {self.location!r}"
        if "prompt" not in names and "messages" not in names:
            raise RequestError(
                f"{named} has no column 'prompt' and none 'messages'; it has {', '.join(names) or 'none'}"
            )
        for name in RESULTS.names:
            if name in names:
                raise RequestError(f"{named} has a column {name!r}, which the output adds; rename it")
        for name, (fits, words) in COLUMNS.items():
            if name in names and not fits(kind := self.schema.field(name).type):
                raise RequestError(f"column {name!r} of {named} holds {kind}, not {words}")

    def _file(self, number: int) -> InputFile:
        fragment = self._files.fragments[number]
        rows = sum(self._files.group_sizes(number))
        more = set(fragment.physical_schema.names) - set(self.schema.names)
        if more:
            raise RequestError(
                f"{self._files.place(number)} has a column {min(more)!r}, which"
                f" {self._files.fragments[0].path} has not"
            )
        filesystem: fs.FileSystem = fragment.filesystem
        return InputFile(fragment.path, filesystem.get_file_info(fragment.path).size or 0, rows)


def _window(batches: Iterator[pa.RecordBatch], first: int, rows: int) -> Iterator[pa.RecordBatch]:
    """Of the rows of some batches, those from `first` on, `rows` of them."""
    for batch in batches:
        if rows <= 0:
            return
        wanted = batch.slice(min(first, batch.num_rows), rows)
        first = max(0, first - batch.num_rows)
        rows -= wanted.num_rows
        if wanted.num_rows:
            yield wanted
