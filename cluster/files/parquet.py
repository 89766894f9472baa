"""The files of a Parquet data set as their footers describe them; no row is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from cluster.config.sections.data import DataConfig
from cluster.errors import RequestError
from cluster.files.backend import StorageError
from cluster.files.retries import patiently, tells_of_the_storage

T = TypeVar("T")

_BROKEN = (OSError, pa.ArrowException)
"""What pyarrow raises where a file is not as it should be; or where it cannot be read just now."""


@dataclass(frozen=True)
class WantedColumn:
    """A column that a task reads.

    Attributes:
        key: the key of the `data` section that names it.
        words: what it should hold.
        fits: whether it does, by its type.
    """

    key: str
    name: str
    words: str
    fits: Callable[[pa.DataType], bool]


def wanted_columns(task: str, data: DataConfig) -> tuple[WantedColumn, ...]:
    """The columns that a built-in task reads; none for a task that reads its data itself."""
    if task == "causal_lm":
        return (WantedColumn("text_column", data.text_column, "text", _is_text),)
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
    """A file, a directory (its partitions `name=value` are columns) or a URI of pyarrow.fs.

    Attributes:
        schema: that of the first file, with the partitions.
        fragments: the files, in the order of their paths.

    Args:
        columns: those that will be read.
        key: the config's key of the source, for messages; may be empty.

    Raises:
        RequestError: the source is not there or no Parquet, or lacks one of the columns.
        StorageError: it cannot be read now.
    """

    def __init__(self, source: str, columns: Sequence[str], key: str = "data.source") -> None:
        self.source = source
        self.columns = list(columns)
        self.key = key
        named = f"{key} {source!r}".strip()
        try:
            self._filesystem, path = (
                fs.FileSystem.from_uri(source) if "://" in source else (fs.LocalFileSystem(), source)
            )
            self._local = isinstance(self._filesystem, fs.LocalFileSystem)
            found = patiently(
                lambda: ds.dataset(
                    path,
                    filesystem=self._filesystem,
                    format="parquet",
                    partitioning="hive",
                    exclude_invalid_files=False,
                ),
                local=self._local,
            )
            self.schema: pa.Schema = found.schema
            self.fragments = sorted(found.get_fragments(), key=lambda item: item.path)
        except (*_BROKEN, ValueError) as error:
            if tells_of_the_storage(error):
                raise StorageError(f"{named} cannot be read: {error}") from error
            raise RequestError(f"{named} cannot be read as Parquet: {error}") from error
        if not self.fragments:
            raise RequestError(f"{named} holds no Parquet file")
        for name in self.columns:
            if name not in self.schema.names:
                has = ", ".join(self.schema.names)
                raise RequestError(f"{named} has no column {name!r}; it has {has}")

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

        own, sizes = self.read(
            index, footer, lambda error: f"{self.place(index)} is no whole Parquet file: {error}"
        )
        partitions = ds.get_partition_keys(fragment.partition_expression)
        for name in self.columns:
            expected = self.schema.field(name).type
            if name in partitions:
                continue
            if name not in own.names:
                raise RequestError(f"{self.place(index)} has no column {name!r}, which others have")
            if own.field(name).type != expected:
                raise RequestError(
                    f"{self.place(index)}: column {name!r} holds {own.field(name).type}; "
                    f"in {self.fragments[0].path} it holds {expected}"
                )
        return sizes

    def misfit(self, column: WantedColumn) -> str | None:
        """How a column is not what it should be, as a sentence; None where it is."""
        kind = self.schema.field(column.name).type
        if column.fits(kind):
            return None
        return (
            f"column {column.name!r} of {self.source!r} (data.{column.key}) holds {kind}, not {column.words}"
        )


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_images(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
