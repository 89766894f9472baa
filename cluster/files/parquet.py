"""The files of a Parquet data set as their footers describe them; no row is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from cluster.config.sections.data import DataConfig
from cluster.errors import RequestError

BROKEN = (OSError, pa.ArrowException)
"""What pyarrow raises where a file is not as it should be."""


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
    """

    def __init__(self, source: str, columns: Sequence[str], key: str = "data.source") -> None:
        self.source = source
        self.columns = list(columns)
        self.key = key
        named = f"{key} {source!r}".strip()
        try:
            if "://" in source:
                filesystem, path = fs.FileSystem.from_uri(source)
            else:
                filesystem, path = fs.LocalFileSystem(), source
            found = ds.dataset(
                path,
                filesystem=filesystem,
                format="parquet",
                partitioning="hive",
                exclude_invalid_files=False,
            )
            self.schema: pa.Schema = found.schema
            self.fragments = sorted(found.get_fragments(), key=lambda item: item.path)
        except (*BROKEN, ValueError) as error:
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

    def group_sizes(self, index: int) -> list[int]:
        """Rows of each row group of a file.

        Raises:
            RequestError: it is no whole Parquet file, lacks one of the columns, or has it with another type
                than the first file.
        """
        fragment = self.fragments[index]
        try:
            own = fragment.physical_schema
            sizes = [group.num_rows for group in fragment.row_groups]
        except BROKEN as error:
            raise RequestError(f"{self.place(index)} is no whole Parquet file: {error}") from error
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
