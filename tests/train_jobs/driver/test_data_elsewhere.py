"""A job's data where no directory is shared: it goes into the storage, and not to the driver's disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from tests.object_store import reached, uri
from tests.small_disk import only_small_files
from tests.train_jobs.driver_alone import DriverAlone, do_without_ray
from tests.train_jobs.ranks import tiny_job, write_corpus
from tests.train_jobs.same_streams import assert_same
from train_jobs.data import growing_array, token_streams
from train_jobs.data.images import ImageFacts
from train_jobs.data.preparation import prepare_data
from train_jobs.data.token_streams import TokenStreams
from train_jobs.data.tokens import prepare_tokens
from train_jobs.records.workspace import Workspace
from train_jobs.spec import DATA

SMALL = 100_000


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with reached() as port:
        yield port


def temporary(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of a machine, for this process and those that it starts."""
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_tokens_go_from_the_driver_to_the_storage_and_from_there_to_whoever_trains(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet", documents=800))
    prepare_tokens(config, tmp_path / "whole")
    whole = TokenStreams(tmp_path / "whole")
    assert whole.train.tokens.nbytes > SMALL
    head = temporary(tmp_path / "head", monkeypatch)
    do_without_ray(monkeypatch)
    driver = DriverAlone(config, Storage(uri(port, "tokens")))
    run = driver.run_storage
    with only_small_files(SMALL):
        driver._prepare_data()
    word = run.read_bytes(f"{DATA}.complete")
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", None)  # it takes no process to see that all is there
        DriverAlone(config, Storage(uri(port, "tokens")))._prepare_data()
    assert run.read_bytes(f"{DATA}.complete") == word
    driver.workspace.clear()
    assert [path for path in head.rglob("*") if path.is_file()] == []
    temporary(tmp_path / "node", monkeypatch)
    rank = Workspace(run)
    rank.fetch(DATA)
    assert_same(TokenStreams(rank.directory / DATA), whole)
    assert not (rank.directory / DATA / ".new").exists()


@pytest.mark.parametrize("batch", [9, 256])
def test_work_that_is_cut_off_goes_on_with_what_is_in_the_storage(
    batch: int, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train_jobs.data.tokenizing._BATCH", batch)
    monkeypatch.setattr(growing_array, "_PIECE_BYTES", 2_000)
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet", documents=60))
    prepare_tokens(config, tmp_path / "whole")
    temporary(tmp_path / "head", monkeypatch)
    place = Storage(uri(port, f"cut-off-{batch}"))
    real = growing_array.GrowingArray._read

    class CutOffError(Exception):
        pass

    def cut_off(pieces: growing_array.GrowingArray) -> Iterator[bytes]:
        yield from list(real(pieces))[:3]
        raise CutOffError

    monkeypatch.setattr(growing_array.GrowingArray, "_read", cut_off)
    with pytest.raises(CutOffError):
        prepare_tokens(config, place)
    assert not place.exists(token_streams.FACTS)
    pieces = place.list(f"{token_streams.STAGED}/train")
    assert len(pieces) > (3 if batch == 9 else 0)
    monkeypatch.setattr(growing_array.GrowingArray, "_read", real)
    assert prepare_tokens(config, place, encode=None)  # type: ignore[arg-type]  # nothing is encoded again
    assert not prepare_tokens(config, place)
    Storage(tmp_path).copy_dir(place, "copy")
    assert_same(TokenStreams(tmp_path / "copy"), TokenStreams(tmp_path / "whole"))


def test_what_is_known_of_images_is_put_beside_the_run(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainJobConfig.model_validate({"task": "image_classification"})
    head = temporary(tmp_path / "head", monkeypatch)
    place = Storage(uri(port, "images"))
    assert prepare_data(config, place)
    assert not prepare_data(config, place)
    Storage(tmp_path).copy_dir(place, "copy")
    assert ImageFacts.read(tmp_path / "copy").labels == tuple(str(digit) for digit in range(10))
    assert list(head.iterdir()) == []
