"""Copies on a node: fetched once, bounded, and not taken from those who have just asked."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.node.cache import RECENT_S, NodeCache

OLD_S = RECENT_S + 100


def filled(size: int, calls: list[Path] | None = None, pause_s: float = 0.0) -> Callable[[Path], None]:
    def fetch(directory: Path) -> None:
        if calls is not None:
            calls.append(directory)
        directory.mkdir()
        time.sleep(pause_s)
        (directory / "weights").write_bytes(b"x" * size)

    return fetch


def age(root: Path, name: str, seconds: float) -> None:
    """Let a copy have been asked for so long ago."""
    mark = (root / name).with_name(f".{Path(name).name}.used")
    then = time.time() - seconds
    os.utime(mark, (then, then))


def test_many_who_ask_at_once_fetch_once(tmp_path: Path) -> None:
    calls: list[Path] = []
    cache = NodeCache(tmp_path / "cache")
    with ThreadPoolExecutor(8) as askers:
        found = set(askers.map(lambda _: cache.get("a/lm/1", filled(10, calls, 0.2)), range(8)))
    assert found == {tmp_path / "cache" / "a" / "lm" / "1"}
    assert len(calls) == 1
    assert (found.pop() / "weights").stat().st_size == 10


def test_one_that_could_not_be_fetched_is_not_there_and_is_fetched_again(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)

    def broken(directory: Path) -> None:
        directory.mkdir()
        (directory / "half").touch()
        raise OSError("the storage is away")

    with pytest.raises(OSError, match="away"):
        cache.get("lm", broken)
    assert not (tmp_path / "lm").exists()
    assert (cache.get("lm", filled(1)) / "weights").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"lm", ".lm.lock", ".lm.used"}


def test_those_that_were_not_asked_for_longest_make_room(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, most_bytes=350)
    for number, name in enumerate(("a", "b", "c")):
        cache.get(name, filled(100))
        age(tmp_path, name, OLD_S + 10 * (3 - number))
    cache.get("a", filled(0))  # again
    cache.get("d", filled(100))
    assert [each.name for each in sorted(tmp_path.iterdir()) if each.is_dir()] == ["a", "c", "d"]
    assert not (tmp_path / ".b.used").exists()
    assert (tmp_path / "a" / "weights").stat().st_size == 100


def test_what_was_asked_for_a_moment_ago_stays_whatever_the_bound(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, most_bytes=1)
    for name in ("a", "b"):
        cache.get(name, filled(100))
    assert cache.prune() == []
    age(tmp_path, "a", OLD_S)
    assert cache.prune() == [tmp_path / "a"]


def test_by_itself_it_takes_half_of_the_room_that_nobody_else_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1000]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2000, 0, free[0]))  # type: ignore[attr-defined]
    cache = NodeCache(tmp_path)
    for name in ("a", "b"):
        cache.get(name, filled(300))
        age(tmp_path, name, OLD_S)
    assert cache.prune() == []
    free[0] = 100  # somebody else fills the disk
    assert cache.prune() == [tmp_path / "a"]
