"""The tokenizer that a job trains: what it is trained on, and what is said meanwhile."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.train_jobs.ranks import tiny_job
from train_jobs.data import remaining
from train_jobs.data.documents import read_documents
from train_jobs.data.own_tokenizer import texts_to_train_on


def test_it_is_trained_on_what_is_not_held_out_and_tells_how_far_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remaining, "LOOK_S", 0.0)
    texts = [None if index % 3 == 0 else f"fish {index}" for index in range(60)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "corpus.parquet", row_group_size=6)
    data, said = tiny_job(tmp_path / "corpus.parquet").data, list[str]()
    trained_on = list(texts_to_train_on(data, said.append))
    assert trained_on == [document.text for document in read_documents(data) if not document.held_out]
    *read, last = said
    assert read[0] == "training a tokenizer: read 0 documents so far (0%, about 0 s left)"
    shares = [int(each.split("(")[1].split("%")[0]) for each in read]
    assert shares == sorted(shares)
    assert shares[-1] > 90, "rows without text are no documents, and are read, too"
    assert last == "training a tokenizer: making its tokens of the words of 30 documents"
