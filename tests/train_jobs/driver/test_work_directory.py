"""The directory where a script runs: its files come along, and what it made stays."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from train_jobs.driver.work_directory import _HALF, RECORD, update_work


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A project as it was submitted."""
    directory = tmp_path / "source"
    (directory / "lib").mkdir(parents=True)
    (directory / "train.py").write_text("print(1)")
    (directory / "lib" / "model.py").write_text("width = 8")
    (directory / "run.sh").write_text("#!/bin/sh\n")
    (directory / "run.sh").chmod(0o755)
    (directory / "log.txt").write_text("")
    return directory


def files(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.name != RECORD
    )


def test_all_files_come_along_once(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "jobs" / "j" / "work"
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "train.pyc").write_bytes(b"x")
    os.symlink("nowhere", source / "dangling")
    os.mkfifo(source / "pipe")
    (source / RECORD).write_text("{}")
    expected = ["lib/model.py", "log.txt", "run.sh", "train.py"]
    assert update_work(source, work) == expected
    assert files(work) == expected
    assert os.access(work / "run.sh", os.X_OK)
    assert update_work(source, work) == []


def test_what_the_script_made_or_changed_stays_and_changed_code_comes(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    update_work(source, work)
    (work / "out").mkdir()
    (work / "out" / "checkpoint.pt").write_text("step 100")
    (work / "log.txt").write_text("step 100\n")
    (source / "train.py").write_text("print(2)  # a comment")
    (source / "new.py").write_text("")
    assert update_work(source, work) == ["new.py", "train.py"]
    assert (work / "out" / "checkpoint.pt").read_text() == "step 100"
    assert (work / "log.txt").read_text() == "step 100\n", (
        "the script wrote it, and nobody changed the source"
    )
    assert (work / "train.py").read_text() == "print(2)  # a comment"


def test_a_file_that_is_gone_here_comes_again_and_one_that_is_gone_there_stays(
    source: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    update_work(source, work)
    (work / "train.py").unlink()
    (source / "lib" / "model.py").unlink()
    assert update_work(source, work) == ["train.py"]
    assert files(work) == ["lib/model.py", "log.txt", "run.sh", "train.py"]


def test_a_kill_on_the_way_loses_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    work, real, copied = tmp_path / "work", shutil.copy2, 0

    def copy(*arguments: Any) -> Any:
        nonlocal copied
        copied += 1
        if copied == 3:
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", copy)
        with pytest.raises(Killed):
            update_work(source, work)
    assert files(work) == ["lib/model.py", "log.txt"], "no half of a file"
    (work / "log.txt").write_text("mine")
    assert update_work(source, work) == ["lib/model.py", "log.txt", "run.sh", "train.py"]


def test_what_a_kill_left_half_is_written_over(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / _HALF).write_text("half of")
    copied = update_work(source, work)
    assert {path: (work / path).read_bytes() for path in copied} == {
        path: (source / path).read_bytes() for path in copied
    }
    assert not list(work.rglob(_HALF))


def test_some_of_the_files_may_be_named(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert update_work(source, work, ["train.py"]) == ["train.py"]
    assert files(work) == ["train.py"]
    assert update_work(source, work, ["train.py", "run.sh"]) == ["run.sh"]
