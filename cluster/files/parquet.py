"""The files of a Parquet data set as their footers describe them; no row is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from cluster.config.sections.data import DataConfig
from cluster.errors import RequestError
from cluster.files.backend import StorageError
from cluster.files.retries import patiently, tells_of_the_storage

T = TypeVar("T")

_PATTERN = re.compile(r"[*?\[]")
_NAMES = (".parquet", ".parq", ".pq")

_BROKEN = (OSError, pa.ArrowException)
"""What pyarrow raises where a file is not as it should be; or where it cannot be read just now."""


@dataclass(frozen=True)
class WantedColumn:
    """A column that a task reads.

    Attributes:
        key: the key of the `data` section that names it.
        name: of the column; a field in it follows after a dot (`translation.en`).
        words: what it should hold.
        fits: whether it does, by its type.
        read_as: the type that it is read with, whatever a file has it stored as; None takes it as it is.
    """

    key: str
    name: str
    words: str
    fits: Callable[[pa.DataType], bool]
    read_as: pa.DataType | None = None


def wanted_columns(task: str, data: DataConfig) -> tuple[WantedColumn, ...]:
    """The columns that a built-in task reads; none for a task that reads its data itself."""
    if task == "causal_lm":
        words = "text, or conversations (lists of `role` and `content`)"
        return (WantedColumn("text_column", data.text_column, words, _is_text_or_chat, pa.large_string()),)
    if task == "image_classification":
        return (
            WantedColumn(
                "image_column",
                data.image_column,
                "images in the Hugging Face layout: struct<bytes: binary, path: string>",
                _is_images,
            ),
            WantedColumn("label_column", data.label_column, "whole numbers", pa.types.is_integer),
        )
    return ()


class ParquetFiles:
    """A file, a directory (its partitions `name=value` are columns), a pattern (`data/train-*`) or a URI.

    Of a directory those files count whose names end as Parquet's do: the Hub's data sets have README.md and
    others beside them. Where none does, all count.

    Attributes:
        schema: that of the first file, with the partitions.
        fragments: the files, in the order of their paths.

    Args:
        columns: those that will be read; see WantedColumn.
        key: the config's key of the source, for messages; may be empty.

    Raises:
        RequestError: the source is not there or no Parquet, or lacks one of the columns.
        StorageError: it cannot be read now.
    """

    def __init__(self, source: str, columns: Sequence[str], key: str = "data.source") -> None:
        self.source = source
        self.columns = list(columns)
        self.key = key
        self._kinds: dict[str, pa.DataType] = {}
        named = f"{key} {source!r}".strip()
        try:
            self._filesystem, path = _filesystem(source)
            self._local = isinstance(self._filesystem, fs.LocalFileSystem)
            found = patiently(lambda: _dataset(self._filesystem, path), local=self._local)
            self.schema: pa.Schema = found.schema
            self.fragments = sorted(found.get_fragments(), key=lambda item: item.path)
        except (*_BROKEN, ValueError) as error:
            if tells_of_the_storage(error):
                raise StorageError(f"{named} cannot be read: {error}") from error
            raise RequestError(f"{named} cannot be read as Parquet: {error}") from error
        if not self.fragments:
            raise RequestError(f"{named} holds no Parquet file")
        for name in self.columns:
            if field_type(self.schema, name) is None:
                has = ", ".join(self.schema.names)
                raise RequestError(f"{named} has no column {name!r}; it has {has}")

    def stamps(self) -> list[list[Any]]:
        """Of each file its path, its size in bytes, and when it was changed last (nanoseconds since 1970; 0
        where nobody says)."""
        paths = [fragment.path for fragment in self.fragments]
        found = patiently(lambda: self._filesystem.get_file_info(paths), local=self._local)
        return [[info.path, info.size, info.mtime_ns or 0] for info in found]

    def place(self, index: int) -> str:
        """The words for where a file is."""
        path = self.fragments[index].path
        return f"{path} ({self.key})" if self.key else path

    def read(self, index: int, read: Callable[[], T], sentence: Callable[[Exception], str]) -> T:
        """Call what reads of a file, again where that may help.

        Args:
            sentence: says of an error that the file is not as it should be.

        Raises:
            RequestError: the file is not as it should be.
            StorageError: it cannot be read now; that says nothing of what is in it.
        """
        try:
            return patiently(read, local=self._local)
        except _BROKEN as error:
            if self._is_away(index, error):
                raise StorageError(f"{self.place(index)} cannot be read: {error}") from error
            raise RequestError(sentence(error)) from error

    def _is_away(self, index: int, error: Exception) -> bool:
        """Whether an error tells of the storage; the file was there when the data set was opened."""
        if not isinstance(error, OSError):
            return False
        if isinstance(error, FileNotFoundError) or tells_of_the_storage(error):
            return True
        if self._local:
            return False
        # The words of an object store's client and of Parquet's reader come as the same kind of error.
        try:
            with self._filesystem.open_input_file(self.fragments[index].path) as file:
                file.read_at(1, 0)
        except OSError:
            return True
        return False

    def group_sizes(self, index: int) -> list[int]:
        """Rows of each row group of a file.

        Raises:
            RequestError: it is no whole Parquet file, lacks one of the columns, or has it with another type
                than the first file.
            StorageError: it cannot be read now.
        """
        fragment = self.fragments[index]

        def footer() -> tuple[pa.Schema, list[int]]:
            return fragment.physical_schema, [group.num_rows for group in fragment.row_groups]

        own, sizes = self.read(index, footer, self._torn(index))
        partitions = ds.get_partition_keys(fragment.partition_expression)
        for name in self.columns:
            if name in partitions:
                continue
            kind, expected = field_type(own, name), self.kind(name)
            if kind is None:
                raise RequestError(f"{self.place(index)} has no column {name!r}, which others have")
            if not _alike(kind, expected):
                raise RequestError(
                    f"{self.place(index)}: column {name!r} holds {kind}; in"
                    f" {self.fragments[0].path} it holds {expected}"
                )
        return sizes

    def group_bytes(self, index: int) -> list[int]:
        """Bytes of each row group of a file, not compressed.

        Raises:
            as of `group_sizes`.
        """
        fragment = self.fragments[index]

        def footer() -> list[int]:
            return [group.total_byte_size for group in fragment.row_groups]

        return self.read(index, footer, self._torn(index))

    def chunks(self, index: int) -> list[list[tuple[str, int, int, int]]]:
        """What tells a file from others without a look at its rows; the same wherever it lies.

        Returns:
            of each row group, for each stored part of a column that is read: its name, its values, and the
            bytes that they take, not compressed and compressed.

        Raises:
            as of `group_sizes`.
        """

        def footer() -> list[list[tuple[str, int, int, int]]]:
            metadata = self.fragments[index].metadata
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            return [[_sizes(part) for part in self._parts(group)] for group in groups]

        return self.read(index, footer, self._torn(index))

    def _parts(self, group: Any) -> Iterator[Any]:
        """The parts of a row group that are read, as they are stored: `image.bytes` of a column `image`."""
        for part in map(group.column, range(group.num_columns)):
            if any(f"{part.path_in_schema}.".startswith(f"{name}.") for name in self.columns):
                yield part

    def kind(self, name: str) -> pa.DataType:
        """The type of a column in the first file where it holds anything."""
        if name not in self._kinds:
            kind = field_type(self.schema, name)
            for index, fragment in enumerate(self.fragments):
                if kind is not None and not pa.types.is_null(kind):
                    break
                look = partial(getattr, fragment, "physical_schema")
                kind = field_type(self.read(index, look, self._torn(index)), name) or kind
            assert kind is not None, "it was looked for"
            self._kinds[name] = kind
        return self._kinds[name]

    def schema_of(self, index: int) -> pa.Schema:
        """That of a file, with the partitions: columns as they are stored in it."""
        own = self.fragments[index].physical_schema
        missing = [field for field in self.schema if field.name not in own.names]
        return pa.schema([*own, *missing])

    def _torn(self, index: int) -> Callable[[Exception], str]:
        return lambda error: f"{self.place(index)} is no whole Parquet file: {error}"

    def misfit(self, column: WantedColumn) -> str | None:
        """How a column is not what it should be, as a sentence; None where it is."""
        kind = self.kind(column.name)
        if column.fits(kind):
            return None
        return (
            f"column {column.name!r} of {self.source!r} (data.{column.key}) holds {kind}, not {column.words}"
        )


def _sizes(part: Any) -> tuple[str, int, int, int]:
    return part.path_in_schema, part.num_values, part.total_uncompressed_size, part.total_compressed_size


def field_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """The type of a column, or of a field in it (`translation.en`); None where there is none."""
    if name in schema.names:
        return schema.field(name).type
    first, *fields = name.split(".")
    if first not in schema.names:
        return None
    kind = schema.field(first).type
    for field in fields:
        if not pa.types.is_struct(kind) or kind.get_field_index(field) < 0:
            return None
        kind = kind.field(field).type
    return kind


def is_text(kind: pa.DataType) -> bool:
    """Whether a type holds text, however it is stored."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_chat(kind: pa.DataType) -> bool:
    """Whether a type holds conversations: lists of what somebody says, each with `role` and `content`."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    said = kind.value_type
    return pa.types.is_struct(said) and min(map(said.get_field_index, ("role", "content"))) >= 0


def _is_text_or_chat(kind: pa.DataType) -> bool:
    return is_text(kind) or is_chat(kind)


def _is_images(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0


def _alike(kind: pa.DataType, expected: pa.DataType) -> bool:
    """Whether a file holds what others do, if it holds anything."""
    return kind == expected or pa.types.is_null(kind) or (is_text(kind) and is_text(expected))


def _filesystem(source: str) -> tuple[fs.FileSystem, str]:
    """Where a source is, and its path there; a pattern's letters mean nothing to the file system."""
    if "://" not in source:
        return fs.LocalFileSystem(), source
    place, mark, options = source.partition("?")  # which is no pattern in a URI
    before, pattern = _split(place)
    filesystem, path = fs.FileSystem.from_uri(f"{before}{mark}{options}")
    return filesystem, f"{path.rstrip('/')}/{pattern}" if pattern else path


def _split(path: str) -> tuple[str, str]:
    """The directory above the first part that is a pattern, and the pattern."""
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts) if _PATTERN.search(part)), None)
    return (path, "") if first is None else ("/".join(parts[:first]) or "/", "/".join(parts[first:]))


def _dataset(filesystem: fs.FileSystem, path: str) -> ds.Dataset:
    files, base = _files(filesystem, path)
    return ds.dataset(
        files,
        filesystem=filesystem,
        format="parquet",
        partitioning="hive",
        partition_base_dir=base,
        exclude_invalid_files=False,
    )


def _files(filesystem: fs.FileSystem, path: str) -> tuple[str | list[str], str | None]:
    """What a data set is made of; and the directory from which on its partitions are named."""
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.Directory:
        found = _below(filesystem, path)
        named = [file for file in found if file.lower().endswith(_NAMES)]
        return (named or found or path), path
    base, pattern = _split(path)
    if info.type == fs.FileType.File or not pattern:
        return path, None
    whole = f"{base.rstrip('/')}/{pattern}"
    matching = [file for file in _below(filesystem, base) if fnmatchcase(file, whole)]
    if not matching:
        raise FileNotFoundError(f"no file is called {path}")
    return matching, base


def _below(filesystem: fs.FileSystem, directory: str) -> list[str]:
    """The files below a directory, but hidden ones and those in hidden directories."""
    selector = fs.FileSelector(directory, recursive=True)
    start = len(directory.rstrip("/")) + 1
    return sorted(
        info.path
        for info in filesystem.get_file_info(selector)
        if info.type == fs.FileType.File
        and not any(part.startswith((".", "_")) for part in info.path[start:].split("/"))
    )
