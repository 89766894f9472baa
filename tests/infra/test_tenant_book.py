"""What is kept of jobs and apps until the nodes of their cluster come back."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.files.storage import Storage, StorageError
from infra.tenant_book import TenantBook
from tests.object_store import reached, uri
from train_jobs.driver.package import Package


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    with reached() as port:
        yield port


@pytest.fixture(params=["path", "object store"])
def book(request: pytest.FixtureRequest, tmp_path: Path) -> TenantBook:
    if request.param == "path":
        return TenantBook(tmp_path / "state" / "tenants")
    return TenantBook(uri(request.getfixturevalue("store"), f"{tmp_path.name}/tenants"))


def package(directory: Path, **files: str) -> Package:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Package(directory, tuple(files), sum(map(len, files.values())))


def test_what_came_with_a_job_is_there_again(book: TenantBook, tmp_path: Path) -> None:
    sent = package(tmp_path / "sent", **{"task.py": "a", "lib/b.py": "bb", "run.sh": ""})
    (tmp_path / "sent/run.sh").chmod(0o755)
    book.keep_job("lm-1", sent, {"SECRET": "x"})
    for path in sent.files:
        (sent.base / path).unlink()  # as what was sent goes when the job is submitted
    with book.job("lm-1") as kept:
        assert kept.environment == {"SECRET": "x"}
        assert kept.package.files == ("lib/b.py", "run.sh", "task.py")
        assert kept.package.size_bytes == 3
        assert (kept.package.base / "lib/b.py").read_text() == "bb"
        assert os.access(kept.package.base / "run.sh", os.X_OK)
    assert not kept.package.base.exists()
    assert book.jobs() == ["lm-1"]
    book.forget_job("lm-1")
    assert book.jobs() == []


def test_secrets_are_for_nobody_else(tmp_path: Path) -> None:
    place = tmp_path / "state/tenants"
    TenantBook(place).keep_job("lm-1", package(tmp_path / "sent"), {"SECRET": "x"})
    assert "SECRET" in (place / "jobs/lm-1.json").read_text()
    (packed,) = place.rglob("*.tar.gz")
    for file in (place / "jobs/lm-1.json", packed):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        above = [each for each in file.parents if each.is_relative_to(place)]
        assert {stat.S_IMODE(each.stat().st_mode) for each in above} == {0o700}
    place.chmod(0o755)
    with pytest.raises(ShoalError, match=r"it must be 700\."):
        TenantBook(place).keep_job("lm-1", package(tmp_path / "sent"), {"SECRET": "y"})


def test_a_job_that_is_gone_on_with_is_kept_as_it_came_then(book: TenantBook, tmp_path: Path) -> None:
    def files() -> tuple[str, ...]:
        with book.job("lm-1") as kept:
            return kept.package.files

    book.keep_job("lm-1", package(tmp_path / "first", **{"a.py": "1"}), {})
    book.keep_job("lm-1", package(tmp_path / "second", **{"b.py": "2"}), {"NEW": "1"})
    assert files() == ("b.py",)
    with book.job("lm-1") as kept:
        book.keep_job("lm-1", kept.package, {"NEW": "2"})
    assert files() == ("b.py",)
    assert book.jobs() == ["lm-1"]


def test_a_job_is_kept_as_it_was_by_whoever_dies_while_it_is_written(
    book: TenantBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.keep_job("lm-1", package(tmp_path / "first", **{"a.py": "1"}), {"A": "1"})
    write_bytes = Storage.write_bytes

    def write(storage: Storage, path: str, data: bytes) -> None:
        if path.endswith(".json"):
            raise StorageError("it is full")
        write_bytes(storage, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write_bytes", write)
        for job in ("lm-1", "lm-2"):
            with pytest.raises(StorageError):
                book.keep_job(job, package(tmp_path / "second", **{"b.py": "2"}), {})
    assert book.jobs() == ["lm-1"]
    with book.job("lm-1") as kept:
        assert (kept.package.files, kept.environment) == (("a.py",), {"A": "1"})


def test_what_is_no_job_is_none_and_who_asks_for_it_is_told(book: TenantBook, tmp_path: Path) -> None:
    book._files.write_bytes("jobs/lm-0/package/task.py", b"as a version before kept it")
    assert book.jobs() == []
    with pytest.raises(ShoalError, match="it is not there"), book.job("lm-0"):
        pass


def test_apps_that_leave_with_the_nodes_stay_in_the_book(book: TenantBook) -> None:
    assert book.apps() == []
    book.keep_apps([{"name": "chat"}])
    book.close(["lm-2", "lm-1"])
    assert book.is_closed
    book.keep_apps([])  # they have left by now
    assert book.apps() == [{"name": "chat"}]
    assert book.left() == ["lm-1", "lm-2"]
    book.open()
    assert book.left() == []
    book.keep_apps([])
    assert book.apps() == []


def test_what_is_forgotten_is_not_written_again_by_those_that_end(book: TenantBook, tmp_path: Path) -> None:
    book.keep_apps([{"name": "chat"}])
    book.keep_job("lm-1", package(tmp_path / "sent"), {})
    book.forget()
    book.keep_apps([{"name": "chat"}])
    assert (book.apps(), book.jobs(), book.left()) == ([], [], [])
    book.forget()
    book.open()
    book.keep_apps([{"name": "chat"}])
    assert book.apps() == [{"name": "chat"}]


def test_it_is_the_one_of_the_cluster_that_one_runs_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHOAL_TENANTS", raising=False)
    assert TenantBook.of_this_cluster() is None
    monkeypatch.setenv("SHOAL_TENANTS", str(tmp_path / "tenants"))
    book = TenantBook.of_this_cluster()
    assert book is not None
    book.close([])
    assert (tmp_path / "tenants/left.json").exists()
    monkeypatch.setenv("SHOAL_TENANTS", "s3://bucket/shoal/tenants")
    assert TenantBook.of_this_cluster() is not None
