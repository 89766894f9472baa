"""The documents of a corpus, and which of them are held out for evaluation."""

from __future__ import annotations

import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from cluster.config.sections.data import DataConfig
from cluster.config.sections.train import BUILT_IN_SOURCES

PYTHON_STDLIB = BUILT_IN_SOURCES["causal_lm"]

# Test suites are most of the files and read like tables; installed packages differ from machine to machine.
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


Said = Mapping[str, Any]
"""What somebody says in a conversation: `role`, `content`, and what else its template looks at."""


@dataclass(frozen=True)
class Document:
    """One text, or one conversation; `held_out` documents are evaluated on and never trained on.

    Attributes:
        text: of a conversation what is said in it, line after line.
        chat: what is said, where it is a conversation.
    """

    name: str
    text: str
    held_out: bool
    chat: Sequence[Said] | None = None


def is_held_out(index: Any, every: int) -> Any:
    """The rule: of each `every` documents (or images) in order, the last is held out."""
    return index % every == every - 1


@dataclass(frozen=True)
class CorpusPart:
    """Documents of a corpus that are read at once, by whoever: a row group of a file.

    Attributes:
        name: where they are.
        rows: how many it has at most; those without text are no documents.
        size: in bytes, as the file says; 0 where nobody says.
        apart: it belongs to `data.held_out_source`.
        texts: reads it: for each document where it is, and what it holds.
    """

    name: str
    rows: int
    size: int
    apart: bool
    texts: Callable[[], Iterator[tuple[str, str | Sequence[Said]]]]


def corpus_parts(data: DataConfig) -> list[CorpusPart]:
    """The parts of a corpus, in an order that is the same on every machine that has the same data.

    Raises:
        RequestError: the source is not there, is not Parquet, or lacks the text column.
    """
    if data.source is None or data.source == PYTHON_STDLIB:
        files = _stdlib_files()
        parts = [CorpusPart(PYTHON_STDLIB, len(files), 0, apart=False, texts=partial(_stdlib_texts, files))]
    else:
        parts = _parquet_parts(data, data.source, "data.source")
    if data.held_out_source is not None:
        parts += _parquet_parts(data, data.held_out_source, "data.held_out_source")
    return parts


def read_documents(data: DataConfig, at: Callable[[int, int], None] = lambda *_: None) -> Iterator[Document]:
    """All documents of a corpus in order.

    Args:
        at: told before each how many rows are read of how many.

    Raises:
        RequestError: as of corpus_parts.
    """
    parts = corpus_parts(data)
    index = before = 0
    rows = sum(part.rows for part in parts)
    for part in parts:
        for row, (name, value) in enumerate(part.texts()):
            at(before + row, rows)
            yield document_of(name, value, held_out=held_out_of(data, index, apart=part.apart))
            index += not part.apart
        before += part.rows


def held_out_of(data: DataConfig, index: Any, *, apart: bool) -> Any:
    """Whether a document (or each of many) is held out, by its place among those of `data.source`."""
    if data.held_out_source is not None:
        return apart
    return is_held_out(index, data.held_out_every)


def document_of(name: str, value: str | Sequence[Said], *, held_out: bool) -> Document:
    """A document from what a part holds."""
    if isinstance(value, str):
        return Document(name, value, held_out)
    # A struct of Parquet has every field in every row: those that are null were not there.
    chat = [{key: part for key, part in said.items() if part is not None} for said in value]
    return Document(name, "\n".join(str(said.get("content", "")) for said in chat), held_out, chat)


def _stdlib_files() -> list[str]:
    root, found = _stdlib(), []
    for directory, below, files in os.walk(root):
        below[:] = set(below) - _STDLIB_LEFT_OUT  # site-packages may hold ten times as many
        place = Path(directory).relative_to(root)
        found += [(place / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def _stdlib_texts(files: Sequence[str]) -> Iterator[tuple[str, str | Sequence[Said]]]:
    for name in files:
        try:
            with tokenize.open(_stdlib() / name) as file:  # honours the encoding that the source declares
                yield name, file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # a handful of files are broken on purpose, to test tools that read sources


@cache
def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _parquet_parts(data: DataConfig, source: str, key: str) -> list[CorpusPart]:
    from train_jobs.data.parquet import open_rows

    rows = open_rows("causal_lm", data, source, key)

    def texts(group: int) -> Iterator[tuple[str, str | Sequence[Said]]]:
        place, table = rows.read_group(group)
        for row, value in enumerate(table.column(data.text_column).to_pylist()):
            if value:
                yield f"{place}, row {row}", value

    apart = key == "data.held_out_source"
    return [
        CorpusPart(rows.place_of_group(index), group.num_rows, group.size, apart, partial(texts, index))
        for index, group in enumerate(rows.groups)
    ]
