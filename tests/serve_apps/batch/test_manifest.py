"""An output goes on only with the work it was begun for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cluster.errors import RequestError
from cluster.files.storage import Storage
from serve_apps.batch.manifest import MANIFEST, Manifest, Totals, read_manifest
from serve_apps.batch.shard_file import read_totals, write_shard

OLD = Manifest(
    app="chat",
    model="lm@latest",
    model_version="lm@1",
    engine="torch",
    precision="fp32",
    context_length=None,
    max_tokens=256,
    sampling={"temperature": 0.0, "stop": ["x"]},
    input="/in",
    input_digest="d",
    rows=10,
    rows_per_shard=5,
    shards=2,
    created_at="2026-01-01T00:00:00+00:00",
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    output = Storage(tmp_path / "out")
    assert read_manifest(output) is None
    for manifest in (OLD, replace(OLD, state="done", totals=Totals(10, 1, 2, 3))):
        manifest.write(output)
        assert read_manifest(output) == manifest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"app": "other"}, "app 'chat' there, 'other' now"),
        ({"model": "lm@2", "model_version": "lm@2"}, "model version 'lm@1' there, 'lm@2' now"),
        ({"sampling": {"temperature": 0.0}}, "sampling"),
        ({"input": "/other"}, "input '/in' there, '/other' now"),
        ({"input_digest": "e", "rows": 11}, "another list of input files.*10 rows then, 11 now"),
        ({"rows_per_shard": 6}, "rows of a shard 5 there, 6 now"),
        ({"precision": "bf16"}, "precision"),
        ({"max_tokens": 100}, "limits.max_tokens"),
    ],
)
def test_other_work_is_refused_with_what_differs(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        replace(OLD, **change).require_same(OLD, "/out")


def test_the_same_work_is_not_refused() -> None:
    replace(OLD, created_at="later", model="lm@1").require_same(OLD, "/out")


def test_directories_of_the_same_name_are_different_models() -> None:
    old = replace(OLD, model="/a/model", model_version="model")
    with pytest.raises(RequestError, match="model '/a/model' there, '/b/model' now"):
        replace(old, model="/b/model").require_same(old, "/out")


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"not empty \(it holds notes\.txt"):
        read_manifest(Storage(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1, "totals": null}'])
def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(RequestError, match=r"_manifest\.json is no manifest"):
        read_manifest(Storage(tmp_path))


def test_a_shard_counts_for_itself(tmp_path: Path) -> None:
    output = Storage(tmp_path)
    write_shard(output, "part-00000.parquet", pa.table({"id": [1, 2]}), Totals(2, 1, 5, 7))
    assert read_totals(output, "part-00000.parquet") == Totals(2, 1, 5, 7)
    (tmp_path / "part-00001.parquet").write_bytes((tmp_path / "part-00000.parquet").read_bytes()[:-9])
    with pytest.raises(RequestError, match=r"part-00001\.parquet is no file"):
        read_totals(output, "part-00001.parquet")
