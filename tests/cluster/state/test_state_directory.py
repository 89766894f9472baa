"""The state directory: short enough for sockets, private, and locked by one command at a time."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.state import state_directory as module
from cluster.state.state_directory import locked, require_private, state_directory, write_private

# What Ray really puts under a node's temp dir: the longest name of a socket it was seen to use.
RAY_SOCKET = "session_2026-11-21_12-04-48_336030_4194304/sockets/dash_MetricsHead"


@pytest.mark.parametrize("length", [1, 20, 63])
@pytest.mark.parametrize("uid", [0, 1000, 4294967294])
def test_a_socket_can_be_bound_under_any_name(tmp_path: Path, length: int, uid: int) -> None:
    directory = state_directory("n" * length, Path(f"/tmp/shoal-{uid}"))
    path = str(directory / "n244" / RAY_SOCKET)
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(FileNotFoundError):
        listener.bind(path)  # an OSError "path too long" otherwise; the directory is not there
    assert tmp_path.exists()


def test_long_names_that_begin_alike_have_directories_of_their_own() -> None:
    names = ["a" * 62 + last for last in "bcd"] + ["a" * 12]
    assert len({state_directory(name) for name in names}) == 4


def test_a_root_that_leaves_no_room_is_a_sentence() -> None:
    with pytest.raises(ShoalError, match="107 bytes"):
        state_directory("demo", Path("/tmp") / ("x" * 60))


def test_a_new_directory_is_ours_alone(tmp_path: Path) -> None:
    require_private(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_directory_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ShoalError, match="open to others"):
        require_private(tmp_path / "open")


def test_a_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ShoalError, match="not a directory"):
        require_private(tmp_path / "link")


def test_someone_elses_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(ShoalError, match="belongs to user"):
        require_private(directory)


def test_a_secret_is_readable_by_us_alone(tmp_path: Path) -> None:
    write_private(tmp_path / "token", "secret")
    assert (tmp_path / "token").read_text() == "secret"
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "state_root", lambda: tmp_path / "r")
    monkeypatch.setattr(module, "SOCKET_PATH_BYTES", 1000)
    return tmp_path / "r"


def test_a_lock_that_is_held_is_waited_for_and_named(root: Path) -> None:
    waits: list[str] = []
    with locked("demo"), pytest.raises(ShoalError, match=r"starting or stopping cluster demo"):  # noqa: SIM117
        with locked("demo", lambda: waits.append("waiting"), timeout_s=0.1):
            pass
    assert waits == ["waiting"]
    assert not root.exists()


def test_a_lock_does_not_outlive_a_killed_holder(root: Path) -> None:
    source = f"""
import sys, time
from pathlib import Path
from cluster.state import state_directory as module
module.state_root = lambda: Path({str(root)!r})
module.SOCKET_PATH_BYTES = 1000
with module.locked("demo"):
    print("held", flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ShoalError), locked("demo", timeout_s=0.0):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with locked("demo", timeout_s=5.0):
        assert root.exists()


def test_the_lock_file_stays_while_the_cluster_has_state(root: Path) -> None:
    with locked("demo"):
        (root / "demo").mkdir(mode=0o700)
    assert (root / ".demo.lock").exists()
    with locked("demo"):
        (root / "demo").rmdir()
    assert not root.exists()
