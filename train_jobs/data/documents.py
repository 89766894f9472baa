"""The documents of a corpus, and which of them are held out for evaluation."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.config.train_section import DataConfig
from cluster.errors import RequestError

PYTHON_STDLIB = "python-stdlib"

# Test suites are most of the files and read like tables; installed packages differ from machine to machine.
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


@dataclass(frozen=True)
class Document:
    """One text; `held_out` documents are evaluated on and never trained on."""

    name: str
    text: str
    held_out: bool


def is_held_out(index: int, every: int) -> bool:
    """The rule: of each `every` documents in order, the last is held out."""
    return index % every == every - 1


def read_documents(data: DataConfig) -> Iterator[Document]:
    """All documents of a source, in an order that is the same on every machine that has the same data.

    Raises:
        RequestError: the source is not there, is not Parquet, or lacks the text column.
    """
    texts = _stdlib_texts() if data.source == PYTHON_STDLIB else _parquet_texts(data.source, data.text_column)
    for index, (name, text) in enumerate(texts):
        yield Document(name, text, is_held_out(index, data.held_out_every))


def _stdlib_texts() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts)
    )
    for name in files:
        try:
            with tokenize.open(root / name) as file:  # honours the encoding that the source declares
                yield name, file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # a handful of files are broken on purpose, to test tools that read sources


def _parquet_texts(source: str, column: str) -> Iterator[tuple[str, str]]:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow import fs

    try:
        if "://" in source:
            filesystem, path = fs.FileSystem.from_uri(source)
        else:
            filesystem, path = fs.LocalFileSystem(), source
        found = ds.dataset(path, filesystem=filesystem, format="parquet", exclude_invalid_files=False)
        schema = found.schema
    except (OSError, pa.ArrowException) as error:
        raise RequestError(f"data.source {source!r} cannot be read as Parquet: {error}") from error
    if column not in schema.names:
        raise RequestError(
            f"data.source {source!r} has no column {column!r} (data.text_column); "
            f"it has {', '.join(schema.names)}"
        )
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise RequestError(f"column {column!r} of {source!r} holds {kind}, not text")
    # Fragments in the order of their paths, rows in the order of the file: the order never depends on timing.
    for fragment in sorted(found.get_fragments(), key=lambda item: item.path):
        try:
            row = 0
            for batch in fragment.to_batches(columns=[column], use_threads=False):
                for value in batch.column(0).to_pylist():
                    if value:
                        yield f"{fragment.path}:{row}", value
                    row += 1
        except (OSError, pa.ArrowException) as error:
            raise RequestError(f"{fragment.path} (data.source) broke after row {row}: {error}") from error
