"""Documents: order, held-out rule, and sources that are wrong."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.config.sections.data import DataConfig
from cluster.errors import RequestError
from train_jobs.data.documents import read_documents


def test_the_standard_library_is_a_corpus_whose_order_and_held_out_part_follow_a_rule() -> None:
    documents = list(read_documents(DataConfig(held_out_every=10)))
    assert len(documents) > 300
    assert [document.name for document in documents] == sorted(document.name for document in documents)
    assert [index for index, document in enumerate(documents) if document.held_out] == list(
        range(9, len(documents), 10)
    )
    assert any(document.name == "argparse.py" and "ArgumentParser" in document.text for document in documents)


def test_parquet_files_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, texts in (("b", ["three", "four"]), ("a", ["one", None, "two"])):
        pq.write_table(pa.table({"body": pa.array(texts, pa.string())}), tmp_path / f"{name}.parquet")
    data = DataConfig(source=str(tmp_path), text_column="body", held_out_every=2)
    documents = list(read_documents(data))
    assert [document.text for document in documents] == ["one", "two", "three", "four"]
    assert [document.held_out for document in documents] == [False, True, False, True]


def test_sources_that_are_wrong_are_named(tmp_path: Path) -> None:
    def fails(**data: str) -> str:
        with pytest.raises(RequestError) as caught:
            list(read_documents(DataConfig(**data)))  # type: ignore[arg-type]
        return str(caught.value)

    assert "nowhere.parquet" in fails(source=str(tmp_path / "nowhere.parquet"))
    (tmp_path / "text.parquet").write_text("not parquet")
    assert "text.parquet" in fails(source=str(tmp_path / "text.parquet"))
    pq.write_table(pa.table({"label": [1], "body": ["x"]}), tmp_path / "good.parquet")
    good = str(tmp_path / "good.parquet")
    assert "label, body" in fails(source=good)
    assert "int64" in fails(source=good, text_column="label")
