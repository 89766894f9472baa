"""A corpus that takes long is tokenized by the job's workers, side by side, wherever they are."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cluster.errors import RequestError
from cluster.files.storage import Storage
from tests.clusters import LiveCluster
from tests.integration.jobs import JOB, JobFile, events, finished, job_file, losses
from tests.object_store import reached, uri
from tests.train_jobs.ranks import merged, tiny_job, write_corpus
from train_jobs.data.token_streams import TokenStreams
from train_jobs.data.tokens import prepare_tokens
from train_jobs.driver.data_errors import StoppedError
from train_jobs.driver.data_process import prepare_apart

DOCUMENTS = 48


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In row groups of four documents."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.parquet"
    table = pq.read_table(write_corpus(path, DOCUMENTS))
    pq.write_table(table, path, row_group_size=4)
    return path


@pytest.fixture(scope="module")
def nodes(running_cluster: LiveCluster) -> list[str]:
    """Ids of those with CPUs."""
    status = json.loads(running_cluster.shoal("status", "--json").stdout)
    return [node["node_id"] for node in status["nodes"] if node["resources"].get("CPU")]


@pytest.fixture
def in_the_cluster(running_cluster: LiveCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started here reach the cluster, as those of a driver do."""
    for name, value in running_cluster.environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_cluster")
def test_the_streams_are_those_that_one_process_writes(
    corpus: Path, nodes: list[str], tmp_path: Path
) -> None:
    config, said = tiny_job(corpus), list[str]()
    assert len(nodes) > 1
    assert prepare_apart(config, tmp_path / "data", lambda: False, said.append, nodes)
    prepare_tokens(config, tmp_path / "alone")
    found, expected = TokenStreams(tmp_path / "data"), TokenStreams(tmp_path / "alone")
    for part in ("train", "held_out"):
        for own, other in zip(getattr(found, part), getattr(expected, part), strict=True):
            assert np.array_equal(own, other)
    assert found.content == expected.content


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_cluster")
def test_where_no_directory_is_shared_they_go_into_the_storage(
    corpus: Path, nodes: list[str], tmp_path: Path
) -> None:
    config = tiny_job(corpus)
    with reached() as port:
        place = Storage(uri(port, "data"))
        assert prepare_apart(config, place, lambda: False, nodes=nodes)
        Storage(tmp_path).copy_dir(place, "copy")
    prepare_tokens(config, tmp_path / "alone")
    assert TokenStreams(tmp_path / "copy").content == TokenStreams(tmp_path / "alone").content


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_cluster")
def test_what_is_wrong_with_a_part_is_said_in_the_same_words(
    corpus: Path, nodes: list[str], tmp_path: Path
) -> None:
    torn = bytearray(corpus.read_bytes())
    middle = pq.ParquetFile(corpus).metadata.row_group(7).column(0).data_page_offset
    torn[middle : middle + 200] = b"\xff" * 200
    path = tmp_path / "torn.parquet"
    path.write_bytes(torn)
    # The job's own tokenizer would have been trained on it.
    prepare_tokens(tiny_job(corpus), tmp_path / "other")
    config = tiny_job(path, data={"tokenizer": str(tmp_path / "other" / "tokenizer")})
    with pytest.raises(RequestError, match=r"torn\.parquet .*row group 7: column 'text' cannot be read"):
        prepare_apart(config, tmp_path / "data", lambda: False, nodes=nodes)


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_cluster")
def test_it_ends_when_it_is_stopped_and_gives_the_nodes_back(
    corpus: Path, nodes: list[str], tmp_path: Path
) -> None:
    config = tiny_job(corpus, workers={"min": 1, "max": 1, "cpus": 2})
    until = time.monotonic() + 2  # all of it takes longer
    with pytest.raises(StoppedError):
        prepare_apart(config, tmp_path / "data", lambda: time.monotonic() > until, nodes=nodes[:1])
    assert prepare_apart(config, tmp_path / "data", lambda: False, nodes=nodes[:1]), "its CPUs are free again"


@pytest.fixture(scope="module")
def jobs(running_cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> JobFile:
    """A job for whose driver everything takes long, and one for whose nothing does."""
    directory = tmp_path_factory.mktemp("jobs")
    elsewhere = tmp_path_factory.mktemp("elsewhere")  # what lies beside the config file all jobs have
    (elsewhere / "sitecustomize.py").write_text(
        "import os\n"
        "from train_jobs.data import remaining, tokenizing\n"
        "os.sched_getaffinity = lambda _: {0}\n"
        "remaining.LOOK_S, tokenizing.LONG_S = 0.0, 0.0\n"
    )
    plain = merged(JOB, {"data": {"source": str(corpus)}, "steps": 20})
    # Of the same documents elsewhere neither copies what the other has made.
    own = shutil.copy(corpus, elsewhere)
    long = {"data": {"source": str(own)}, "env": {"PYTHONPATH": f"{elsewhere}:{Path.cwd()}"}}
    return job_file(running_cluster, directory, {"plain": plain, "long": merged(plain, long)})


@pytest.mark.slow
def test_a_job_leases_its_workers_for_it_and_trains_as_ever(jobs: JobFile) -> None:
    run, other = jobs.submit("long"), jobs.submit("plain")
    assert [finished(each)["status"] for each in (run, other)] == ["succeeded", "succeeded"]
    kinds = [event["kind"] for event in events(run)]
    assert kinds.index("leased") < kinds.index("preparing", kinds.index("preparing") + 1)
    begun: list[dict[str, Any]] = events(run, "preparing")
    assert [event.get("workers") for event in begun] == [None, 2]
    assert any("to do it side by side" in event["said"] for event in events(run, "prepares"))
    assert losses(run) == losses(other)
    assert [event.get("workers") for event in events(other, "preparing")] == [None]
