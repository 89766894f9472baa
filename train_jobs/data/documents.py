"""The documents of a corpus, and which of them are held out for evaluation."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


def read_documents(data: DataConfig) -> Iterator[Document]:
    """All documents of a source, in an order that is the same on every machine that has the same data.

    Raises:
        RequestError: the source is not there, is not Parquet, or lacks the text column.
    """
    texts: Iterator[tuple[str, str | Sequence[Said]]]
    if data.source is None or data.source == PYTHON_STDLIB:
        texts = _stdlib_texts()
    else:
        texts = _parquet_texts(data, data.source, "data.source")
    for index, (name, value) in enumerate(texts):
        held_out = data.held_out_source is None and is_held_out(index, data.held_out_every)
        yield _document(name, value, held_out=held_out)
    if data.held_out_source is not None:
        for name, value in _parquet_texts(data, data.held_out_source, "data.held_out_source"):
            yield _document(name, value, held_out=True)


def _document(name: str, value: str | Sequence[Said], *, held_out: bool) -> Document:
    if isinstance(value, str):
        return Document(name, value, held_out)
    # A struct of Parquet has every field in every row: those that are null were not there.
    chat = [{key: part for key, part in said.items() if part is not None} for said in value]
    return Document(name, "\n".join(str(said.get("content", "")) for said in chat), held_out, chat)


def _stdlib_texts() -> Iterator[tuple[str, str | Sequence[Said]]]:
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


def _parquet_texts(data: DataConfig, source: str, key: str) -> Iterator[tuple[str, str | Sequence[Said]]]:
    from train_jobs.data.parquet import open_rows

    rows = open_rows("causal_lm", data, source, key)
    for place, table in rows.walk():
        for row, value in enumerate(table.column(data.text_column).to_pylist()):
            if value:
                yield f"{place}, row {row}", value
