"""Directories by their URI: a copy on the node, fetched once, and again when something has changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.models.directory_here import directory_here
from tests.object_store import CREDENTIALS, object_store, uri


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with object_store() as port:
        yield port


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def test_a_path_is_what_it_is(tmp_path: Path) -> None:
    assert directory_here("/no/such/directory") == "/no/such/directory"
    assert directory_here(f"file://{tmp_path}") == str(tmp_path)


def test_a_directory_elsewhere_is_fetched_once_and_again_when_it_has_changed(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = uri(port, "models/lm/1")
    storage = Storage(location)
    storage.write_bytes("config.json", b"{}")
    storage.write_bytes("deep/er.txt", b"deeper")
    first = Path(directory_here(location, tmp_path))
    assert (first / "config.json").read_text() == "{}"
    assert (first / "deep/er.txt").read_text() == "deeper"
    fetched: list[str] = []
    monkeypatch.setattr(Storage, "download_dir", lambda self, path, local: fetched.append(path))
    assert Path(directory_here(location, tmp_path)) == first
    assert fetched == []
    monkeypatch.undo()
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    time.sleep(1.1)  # an object store tells seconds
    storage.write_bytes("config.json", b"[]")  # as long as before
    changed = Path(directory_here(location, tmp_path))
    assert (changed / "config.json").read_text() == "[]"
    assert (first / "config.json").read_text() == "{}", "whoever reads the old one goes on"


def test_what_is_not_there_is_a_sentence(port: int, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"there is no directory s3://.*/nothing.*, or it is empty"):
        directory_here(uri(port, "nothing"), tmp_path)
    with pytest.raises(ShoalError):
        directory_here("no-such-scheme://x/y", tmp_path)
    assert not list(tmp_path.rglob("*.json"))
