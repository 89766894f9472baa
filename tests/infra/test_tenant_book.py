"""What is kept of jobs and apps until the nodes of their cluster come back."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from infra.tenant_book import TenantBook
from train_jobs.driver.package import Package


@pytest.fixture
def book(tmp_path: Path) -> TenantBook:
    return TenantBook(tmp_path / "state" / "tenants")


def package(directory: Path, **files: str) -> Package:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Package(directory, tuple(files), sum(map(len, files.values())))


def test_what_came_with_a_job_is_there_again(book: TenantBook, tmp_path: Path) -> None:
    sent = package(tmp_path / "sent", **{"task.py": "a", "lib/b.py": "bb"})
    book.keep_job("lm-1", sent, {"SECRET": "x"})
    for path in (tmp_path / "sent").rglob("*.py"):
        path.unlink()  # as what was sent goes when the job is submitted
    kept = book.job("lm-1")
    assert kept.environment == {"SECRET": "x"}
    assert kept.package.files == ("lib/b.py", "task.py")
    assert kept.package.size_bytes == 3
    assert (kept.package.base / "lib/b.py").read_text() == "bb"
    assert book.jobs() == ["lm-1"]
    book.forget_job("lm-1")
    assert book.jobs() == []


def test_secrets_are_for_nobody_else(book: TenantBook, tmp_path: Path) -> None:
    book.keep_job("lm-1", package(tmp_path / "sent"), {"SECRET": "x"})
    (file,) = (tmp_path / "state").rglob("environment.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    modes = {
        stat.S_IMODE(each.stat().st_mode)
        for each in file.parents
        if each.is_relative_to(tmp_path / "state/tenants")
    }
    assert modes == {0o700}


def test_a_job_that_is_gone_on_with_is_kept_as_it_came_then(book: TenantBook, tmp_path: Path) -> None:
    book.keep_job("lm-1", package(tmp_path / "first", **{"a.py": "1"}), {})
    book.keep_job("lm-1", package(tmp_path / "second", **{"b.py": "2"}), {"NEW": "1"})
    assert book.job("lm-1").package.files == ("b.py",)
    book.keep_job("lm-1", book.job("lm-1").package, {"NEW": "2"})
    assert book.job("lm-1").package.files == ("b.py",)
    assert book.jobs() == ["lm-1"]


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
