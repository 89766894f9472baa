"""A run's files on nodes that share no directory: put by one, fetched once by each of the others."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs

from cluster.files.storage import Storage
from train_jobs.records.workspace import Workspace


@pytest.fixture
def storage() -> Storage:
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    return Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)


def on_node(name: str, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    directory = tmp_path / name
    directory.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return Workspace(storage)


def test_what_one_node_puts_the_others_fetch_once(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (on_node(name, storage, tmp_path, monkeypatch) for name in ("one", "other"))
    assert one.directory != other.directory
    one.fetch("data")
    assert not (one.directory / "data").exists(), "nobody has put it yet"
    (one.directory / "data" / "tokenizer").mkdir(parents=True)
    (one.directory / "data" / "tokenizer" / "vocabulary").write_text("words")
    assert not other.has("data")
    one.put("data")
    assert other.has("data")
    with ThreadPoolExecutor(4) as processes:
        list(processes.map(lambda _: other.fetch("data"), range(4)))
    copied = other.directory / "data" / "tokenizer" / "vocabulary"
    assert copied.read_text() == "words"
    copied.write_text("mine")
    other.fetch("data")
    assert copied.read_text() == "mine", "it was fetched twice"
    (one.directory / "data" / "tokenizer" / "vocabulary").write_text("other words")
    one.put("data")
    other.fetch("data")
    assert copied.read_text() == "other words", "it was put anew"
    other.clear()
    assert not other.directory.exists()
    one.forget("data")
    assert not one.has("data")
    assert storage.list() == []


def test_what_was_not_put_to_its_end_is_not_there(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (on_node(name, storage, tmp_path, monkeypatch) for name in ("one", "other"))
    (one.directory / "data").mkdir()
    (one.directory / "data" / "a").write_text("a")
    one.put("data")

    def broken(*_: object) -> None:
        raise OSError("the node is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "upload_dir", broken)
        with pytest.raises(OSError, match="the node is gone"):
            one.put("data")
    other.fetch("data")
    assert not (other.directory / "data").exists()


def test_where_every_node_mounts_the_storage_nothing_is_copied(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "storage").child("jobs", "one")
    workspace = Workspace(storage)
    assert workspace.directory == tmp_path / "storage" / "jobs" / "one"
    (workspace.directory / "data").mkdir(parents=True)
    workspace.put("data")
    workspace.fetch("data")
    assert [path.name for path in workspace.directory.iterdir()] == ["data"]
    workspace.clear()
    assert workspace.directory.is_dir(), "it is the run itself"
    workspace.forget("data")
    assert not any(workspace.directory.iterdir())


def test_what_others_leave_behind_or_take_away_is_in_nobodys_way(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs that ended elsewhere copies go after a week; not those that somebody uses, however old."""
    used = on_node("one", storage.child("used"), tmp_path, monkeypatch)
    left = on_node("one", storage.child("left"), tmp_path, monkeypatch)
    assert left._in_use is not None
    left._in_use.close()  # as when its process ends
    week_ago = time.time() - 8 * 86400
    for each in (used, left):
        os.utime(each.directory, (week_ago, week_ago))
    vanished = used.directory.parent / "vanished"
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path == vanished:
            vanished.rmdir()  # its own process is quicker
        return real(path, **options)

    vanished.mkdir()
    monkeypatch.setattr(Path, "stat", stat)
    new = on_node("one", storage.child("new"), tmp_path, monkeypatch)
    assert new.directory.is_dir()
    assert used.directory.is_dir(), "a job may take longer than a week"
    assert not left.directory.exists()
