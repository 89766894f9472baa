"""The state directory: private, and locked by one command at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.state import state_directory as module
from cluster.state.state_directory import locked, require_private, state_directory, write_private


def test_it_lies_where_people_look_for_such_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert state_directory("demo") == tmp_path / ".local/state/shoal/demo"
    monkeypatch.setenv("XDG_STATE_HOME", "/srv/state")
    assert state_directory("demo") == Path("/srv/state/shoal/demo")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which the specification has ignored
    assert state_directory("demo") == tmp_path / ".local/state/shoal/demo"


def test_a_place_that_cannot_be_made_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file/state"))
    with pytest.raises(ShoalError, match=r"cannot be made \(Not a directory\); XDG_STATE_HOME names another"):  # noqa: SIM117
        with locked("demo"):
            pass


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
