"""Batches of a fast fake engine on a real cluster: what comes out, what goes on, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from cluster.config.sections.serve import LimitsConfig, ServeAppConfig
from cluster.errors import RequestError, ShoalError
from serve_apps.batch.manifest import MANIFEST
from serve_apps.batch.progress import View
from serve_apps.batch.request import BatchRequest
from serve_apps.batch.run import run_spec
from serve_apps.spec import AppSpec
from tests.clusters import LiveCluster
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> AppSpec:
    """An app of two ranks a replica whose engine counts on from the prompt's last token."""
    directory = tmp_path_factory.mktemp("fake-model")
    make_tokenizer(directory)
    config = ServeAppConfig(model=str(directory), tensor=2, limits=LimitsConfig(batch=4, max_tokens=50))
    engine = "tests.serve_apps.fake_engine:FakeEngine"
    return AppSpec("chat", config, model_path=str(directory), model_version="fake@1", engine=engine)


@pytest.fixture(scope="module")
def call(running_cluster: LiveCluster) -> Iterator[Driver]:
    with Driver(running_cluster.record) as call:
        yield call


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.list_(pa.int64())), ("max_tokens", pa.int64())])
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return str(path)


def read(output: Path) -> list[dict[str, Any]]:
    return ds.dataset(output, format="parquet").to_table().to_pylist()


def counted(first: int, tokens: int) -> str:
    return "".join(f" {first + 1 + step}" for step in range(tokens))


@pytest.mark.slow
def test_every_row_has_its_answer_or_its_error_and_what_is_done_stays(
    call: Driver, spec: AppSpec, tmp_path: Path
) -> None:
    spec = replace(spec, config=spec.config.model_copy(update={"tensor": 1}))
    rows = [{"id": i, "prompt": [i + 10], "max_tokens": 3 if i % 2 else None} for i in range(30)]
    rows[4]["prompt"] = []
    rows[5]["prompt"] = [100_000]
    rows[6]["prompt"] = [5]  # the engine refuses this one
    rows[7]["max_tokens"] = 51
    rows[8]["prompt"] = None
    request = BatchRequest(
        write(tmp_path / "in.parquet", rows), str(tmp_path / "out"), {"max_tokens": 2}, None, 8
    )
    first = call(run_spec, spec, request, View())
    assert {name: first[name] for name in ("app", "model", "rows", "failed", "skipped")} == {
        "app": "chat",
        "model": "fake@1",
        "rows": 30,
        "failed": 5,
        "skipped": 0,
    }
    answers = read(tmp_path / "out")
    assert [{name: row[name] for name in rows[0]} for row in answers] == rows
    good = [row for row in answers if row["error"] is None]
    assert {row["id"] for row in answers} - {row["id"] for row in good} == {4, 5, 6, 7, 8}
    for row in good:
        tokens = row["max_tokens"] or 2
        assert row["answer"] == counted(row["prompt"][-1], tokens)
        assert (row["finish_reason"], row["prompt_tokens"], row["completion_tokens"]) == ("length", 1, tokens)
        assert row["model_version"] == "fake@1"
    errors = {row["id"]: row["error"] for row in answers if row["error"] is not None}
    assert all(row["answer"] is None for row in answers if row["id"] in errors)
    assert "'prompt' is wrong" in errors[4] or "empty" in errors[4]
    assert "vocabulary" in errors[5]
    assert errors[6] == "this prompt is refused."
    assert "at most 50" in errors[7]
    assert "null" in errors[8]
    assert first["completion_tokens"] == sum(row["completion_tokens"] for row in good)

    # What an interrupted run has left is done as far as its files are there.
    files = sorted((tmp_path / "out").glob("part-*"))
    assert len(files) == 4
    before = {path: path.stat().st_mtime_ns for path in files}
    files[1].unlink()
    manifest = tmp_path / "out" / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "state": "running", "totals": None}))
    second = call(run_spec, spec, request, View())
    assert (second["skipped"], second["rows"], second["failed"]) == (22, 30, 5)
    assert second["completion_tokens"] == first["completion_tokens"]
    assert read(tmp_path / "out") == answers
    after = {path: path.stat().st_mtime_ns for path in files}
    assert [path.name for path in files if before[path] != after[path]] == ["part-00001.parquet"]

    # And what is complete stays as it is.
    third = call(run_spec, spec, request, View())
    assert third["skipped"] == 30
    assert {path: path.stat().st_mtime_ns for path in files} == after
    assert call(driver.leases) == {}


@pytest.mark.slow
def test_other_work_in_the_same_place_is_refused_before_anything_starts(
    call: Driver, spec: AppSpec, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.parquet", [{"id": 0, "prompt": [10], "max_tokens": 1}])
    request = BatchRequest(source, str(tmp_path / "out"))
    call(run_spec, spec, request, View())
    before = read(tmp_path / "out")
    for changed in (
        BatchRequest(source, request.output, {"temperature": 0.0}),
        BatchRequest(write(tmp_path / "b.parquet", before), request.output),
        BatchRequest(source, str(tmp_path)),
    ):
        with pytest.raises(RequestError):
            call(run_spec, spec, changed, View())
    with pytest.raises(RequestError, match="inside"):
        call(run_spec, spec, BatchRequest(str(tmp_path), str(tmp_path / "new")), View())
    assert not (tmp_path / "new").exists()
    assert read(tmp_path / "out") == before


def test_without_room_it_says_so_and_begins_nothing(call: Driver, spec: AppSpec, tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": [10], "max_tokens": 1} for i in range(3)]
    request = BatchRequest(write(tmp_path / "in.parquet", rows), str(tmp_path / "out"), {}, 3, 1)
    with pytest.raises(ShoalError, match="no room for 3 replicas of 2 CPU each"):
        call(run_spec, spec, request, View(), lease_timeout_s=1)
    assert call(driver.leases) == {}
    assert not list((tmp_path / "out").glob("part-*"))


@pytest.mark.slow
def test_a_row_that_breaks_the_engine_again_and_again_ends_the_run_and_keeps_the_rest(
    call: Driver, spec: AppSpec, tmp_path: Path
) -> None:
    rows = [{"id": i, "prompt": [i + 10], "max_tokens": 20} for i in range(20)]
    rows[19]["prompt"] = [3]
    source = write(tmp_path / "in.parquet", rows)
    request = BatchRequest(source, str(tmp_path / "out"), {}, 1, 2)
    with pytest.raises(ShoalError, match=r"ended 3 times while shard 9 .*broken on request"):
        call(run_spec, spec, request, View())
    assert call(driver.leases) == {}
    done = read(tmp_path / "out")
    # Five shards are in hand at once: those beside it may not have had their next turn.
    shards = sorted({row["id"] // 2 for row in done})
    assert [row["id"] for row in done] == [row for shard in shards for row in (2 * shard, 2 * shard + 1)]
    assert len(shards) >= 5
    assert 9 not in shards
    assert all(row["answer"] == counted(row["prompt"][-1], 20) for row in done)


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why(call: Driver, spec: AppSpec, tmp_path: Path) -> None:
    broken = AppSpec(
        "broken", spec.config, str(tmp_path / "nothing"), "x@1", engine="tests.serve_apps.fake_engine:None"
    )
    source = write(tmp_path / "in.parquet", [{"id": 0, "prompt": [10], "max_tokens": 1}])
    with pytest.raises(ShoalError, match=r"a replica could not be started: .*nothing"):
        call(run_spec, broken, BatchRequest(source, str(tmp_path / "out")), View())
    assert call(driver.leases) == {}
