"""Rows of Parquet by index, read by row group; what is broken is named with its place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.sections.data import DataConfig
from cluster.errors import RequestError
from cluster.files.storage import Storage
from tests.object_store import CREDENTIALS, object_store, uri
from train_jobs.data.parquet import ParquetRows, open_rows


def write(path: Path, first: int, rows: int, group: int = 10, **columns: Sequence[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.arange(first, first + rows)
    table = pa.table({"number": values, "text": [f"row {value}" for value in values], **columns})
    pq.write_table(table, path, row_group_size=group, compression="none")


def test_rows_count_through_many_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, first, rows in (("b", 25, 31), ("a", 0, 25), ("c/d", 56, 4)):
        write(tmp_path / f"{name}.parquet", first, rows)
    rows = ParquetRows(str(tmp_path), ["text", "number"], kept=2)
    assert len(rows) == 60
    assert rows.group_sizes() == [10, 10, 5, 10, 10, 10, 1, 4]
    for index in np.random.default_rng(0).permutation(60).tolist():
        assert rows.row(index) == {"text": f"row {index}", "number": index}
    assert [value for _, table in rows.walk() for value in table["number"].to_pylist()] == list(range(60))
    assert rows.place_of(26) == f"{tmp_path}/b.parquet (data.source), row group 0, row 1"
    with pytest.raises(IndexError):
        rows.row(60)


def test_partitions_are_columns_and_uris_are_opened(tmp_path: Path) -> None:
    write(tmp_path / "language=de" / "x.parquet", 0, 3)
    write(tmp_path / "language=en" / "x.parquet", 3, 2)
    rows = ParquetRows(f"file://{tmp_path}", ["number", "language"])
    assert [rows.row(index)["language"] for index in range(5)] == ["de"] * 3 + ["en"] * 2


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 39), min_size=1, max_size=30))
def test_few_row_groups_are_kept(kept: int, indices: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory) / "x.parquet", 0, 40)
        rows = ParquetRows(directory, ["number"], kept=kept)
        assert [rows.row(index)["number"] for index in indices] == indices
        assert len(rows._tables) <= kept


def test_another_process_opens_the_files_for_itself(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", 0, 20)
    rows = ParquetRows(str(tmp_path), ["number"])
    opened = rows.files
    child = os.fork()
    if child == 0:
        os._exit(0 if rows.row(11)["number"] == 11 and rows.files is not opened else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def fails(source: Path, columns: Sequence[str] = ("text", "number")) -> str:
    with pytest.raises(RequestError) as caught:
        list(ParquetRows(str(source), columns).walk())
    return str(caught.value)


def test_a_missing_column_a_changed_type_and_a_cut_file_are_named(tmp_path: Path) -> None:
    assert "nowhere" in fails(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no Parquet file" in fails(tmp_path / "empty")
    write(tmp_path / "d" / "a.parquet", 0, 5)
    assert "has no column 'body'; it has number, text" in fails(tmp_path / "d", ["body"])

    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "d" / "b.parquet")
    assert "b.parquet (data.source) has no column 'number', which others have" in fails(tmp_path / "d")

    pq.write_table(pa.table({"text": ["x"], "number": ["one"]}), tmp_path / "d" / "b.parquet")
    message = fails(tmp_path / "d")
    assert "b.parquet (data.source): column 'number' holds string; in " in message
    assert message.endswith("d/a.parquet it holds int64")

    write(tmp_path / "d" / "b.parquet", 5, 50)
    whole = (tmp_path / "d" / "b.parquet").read_bytes()
    (tmp_path / "d" / "b.parquet").write_bytes(whole[:-20])
    assert "b.parquet" in fails(tmp_path / "d")


def test_a_broken_row_group_is_named_with_its_column(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write(path, 0, 30)
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(1)
    assert chunk.path_in_schema == "text"
    broken = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    broken[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(bytes(broken))
    assert f"{path} (data.source), row group 1: column 'text' cannot be read" in fails(path)
    rows = ParquetRows(str(path), ["text", "number"])
    assert rows.row(9) == {"text": "row 9", "number": 9}
    assert rows.row(20)["number"] == 20
    with pytest.raises(RequestError, match="row group 1: column 'text'"):
        rows.row(10)


def test_of_a_directory_the_files_of_parquet_are_read_as_the_hub_has_them(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", 0, 3)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", 3, 2)
    write(tmp_path / ".cache" / "huggingface" / "x.parquet", 100, 1)
    (tmp_path / "README.md").write_text("# A data set")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "data" / "_SUCCESS").write_text("")
    rows = ParquetRows(str(tmp_path), ["number"])
    assert [rows.row(index)["number"] for index in range(len(rows))] == [0, 1, 2, 3, 4]
    os.rename(tmp_path / "data", tmp_path / "unnamed")
    for path in (tmp_path / "unnamed").iterdir():
        path.rename(path.with_suffix(""))
    assert len(ParquetRows(str(tmp_path / "unnamed"), ["number"])) == 5, "whatever they are called"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_pattern_names_files(tmp_path: Path, scheme: str) -> None:
    for name, first in (("train-0", 0), ("train-1", 2), ("test-0", 10)):
        write(tmp_path / "split=all" / f"{name}.parquet", first, 2)
    rows = ParquetRows(f"{scheme}{tmp_path}/*/train-*.parquet", ["number", "split"])
    assert [rows.row(index) for index in range(len(rows))] == [
        {"number": number, "split": "all"} for number in range(4)
    ]
    with pytest.raises(RequestError, match="no file is called"):
        ParquetRows(f"{scheme}{tmp_path}/*/valid-*.parquet", ["number"])
    write(tmp_path / "odd[1].parquet", 5, 1)
    assert len(ParquetRows(str(tmp_path / "odd[1].parquet"), ["number"])) == 1, (
        "it is no pattern: it is there"
    )


def test_a_uri_has_options_and_may_be_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with object_store() as port:
        storage = Storage(uri(port, "data"))
        for name, first in (("train-0", 0), ("train-1", 2), ("test-0", 10)):
            write(tmp_path / f"{name}.parquet", first, 2)
            storage.write_bytes(f"{name}.parquet", (tmp_path / f"{name}.parquet").read_bytes())
        whole = ParquetRows(uri(port, "data"), ["number"])
        assert len(whole) == 6
        some = ParquetRows(uri(port, "data/train-*.parquet"), ["number"])
        assert [some.row(index)["number"] for index in range(len(some))] == [0, 1, 2, 3]


TEXTS = {
    "string": pa.array(["a", None, "b"], pa.string()),
    "large": pa.array(["a", None, "b"], pa.large_string()),
    "view": pa.array(["a", None, "b"], pa.string_view()),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "nothing": pa.nulls(3),
}


@pytest.mark.parametrize("first", TEXTS)
def test_text_is_read_however_each_file_has_it(tmp_path: Path, first: str) -> None:
    names = [first, *(name for name in TEXTS if name != first)]
    for number, name in enumerate(names):
        pq.write_table(pa.table({"text": TEXTS[name]}), tmp_path / f"{number}.parquet")
    rows = open_rows("causal_lm", DataConfig(text_column="text"), str(tmp_path), "data.source")
    found = [table.column("text") for _, table in rows.walk()]
    assert {column.type for column in found} == {pa.large_string()}
    assert {name: column.to_pylist() for name, column in zip(names, found, strict=True)} == {
        name: [None] * 3 if name == "nothing" else ["a", None, "b"] for name in names
    }


def test_a_field_of_a_column_is_named_after_a_dot(tmp_path: Path) -> None:
    translation = pa.array([{"en": "fish", "de": {"text": "Fisch"}}, None])
    pq.write_table(pa.table({"translation": translation, "a.b": ["x", "y"]}), tmp_path / "x.parquet")
    rows = ParquetRows(str(tmp_path), ["translation.en", "translation.de.text", "a.b"])
    assert [list(rows.row(index).values()) for index in (0, 1)] == [["fish", "Fisch", "x"], [None, None, "y"]]
    with pytest.raises(RequestError, match=r"has no column 'translation\.fr'"):
        ParquetRows(str(tmp_path), ["translation.fr"])


def test_only_nothing_is_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.nulls(3)}), tmp_path / "x.parquet")
    with pytest.raises(RequestError, match="holds null, not text"):
        open_rows("causal_lm", DataConfig(), str(tmp_path), "data.source")
