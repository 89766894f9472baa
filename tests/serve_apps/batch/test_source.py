"""An input is checked as a whole before anything starts, and read in slices that are its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.errors import RequestError
from serve_apps.batch.plan import Shard, plan_shards
from serve_apps.batch.source import Source


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize("rows_per_shard", [1, 3, 7, 10, 100])
@pytest.mark.parametrize("group", [1, 4, 10, 1000])
def test_shards_are_the_rows_of_the_files_in_order(tmp_path: Path, rows_per_shard: int, group: int) -> None:
    for number, (first, last) in enumerate([(0, 10), (10, 10), (10, 23)]):
        ids = pa.array(range(first, last), pa.int64())
        columns = {"prompt": ids.cast(pa.string()), "id": ids}
        write(tmp_path / f"{number}.parquet", columns, row_group_size=group)
    source = Source(str(tmp_path))
    plan = plan_shards(source.check(), rows_per_shard)
    rows = [row for shard in plan.shards for row in source.read(shard).to_pylist()]
    assert rows == [{"prompt": str(row), "id": row} for row in range(23)]


def test_a_slice_of_a_long_group_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"prompt": [str(row) for row in range(5000)]})
    table = Source(str(path)).read(Shard(0, str(path), 2500, 1700))
    assert table.column("prompt").to_pylist() == [str(row) for row in range(2500, 4200)]


def test_partitions_are_columns(tmp_path: Path) -> None:
    write(tmp_path / "lang=de" / "a.parquet", {"prompt": ["hallo"]})
    write(tmp_path / "lang=en" / "a.parquet", {"prompt": ["hello"]})
    source = Source(str(tmp_path))
    rows = [source.read(shard).to_pylist()[0] for shard in plan_shards(source.check(), 10).shards]
    assert rows == [{"prompt": "hallo", "lang": "de"}, {"prompt": "hello", "lang": "en"}]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"text": ["a"]}, "no column 'prompt' and none 'messages'; it has text"),
        ({"prompt": [1.5]}, "column 'prompt' .* holds double, not text or lists of token ids"),
        ({"prompt": [["a", "b"]]}, "not text or lists of token ids"),
        ({"messages": ["hi"]}, "column 'messages' .* holds string"),
        ({"prompt": ["a"], "max_tokens": [1.0]}, "column 'max_tokens' .* holds double, not whole numbers"),
        ({"prompt": ["a"], "temperature": ["warm"]}, "column 'temperature' .* not numbers"),
        ({"prompt": ["a"], "answer": ["b"]}, "has a column 'answer', which the output adds"),
        ({"prompt": pa.array([], pa.string())}, "has no rows"),
    ],
)
def test_wrong_columns_are_wrong_requests(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "a.parquet", columns)
    with pytest.raises(RequestError, match=says):
        Source(str(path)).check()


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": ["a"], "id": [1], "more": [1]}, "has a column 'more', which .*a.parquet has not"),
        ({"prompt": [[1]], "id": [1]}, "column 'prompt' holds list"),
        ({"prompt": ["a"]}, "has no column 'id'"),
    ],
)
def test_files_that_differ_are_wrong_requests(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    write(tmp_path / "a.parquet", {"prompt": ["a"], "id": [1]})
    write(tmp_path / "b.parquet", columns)
    with pytest.raises(RequestError, match=says):
        Source(str(tmp_path)).check()


def test_what_is_no_parquet_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not parquet")
    for place in (tmp_path / "nothing", tmp_path / "a.parquet", tmp_path):
        with pytest.raises(RequestError, match="cannot be read as Parquet"):
            Source(str(place)).check()


def test_a_file_that_changed_meanwhile_is_not_read_as_the_old_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"prompt": ["a"] * 10})
    (shard,) = plan_shards(Source(str(path)).check(), 10).shards
    write(path, {"prompt": ["a"] * 9})
    with pytest.raises(RequestError, match="other rows than when the run began"):
        Source(str(path)).read(shard)
