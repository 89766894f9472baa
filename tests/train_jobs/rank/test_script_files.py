"""What a script writes beside itself, over the life of its job: real drivers and ranks, and no cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from tests.train_jobs.driver_alone import DriverAlone, do_without_ray
from tests.train_jobs.fork_server import Server
from tests.train_jobs.rank.test_script_ranks import group_of, job_of, run
from train_jobs.driver.work_directory import RECORD, update_work
from train_jobs.spec import WORK

KEEPS_A_DIARY = """
import os, sys
from pathlib import Path
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
Path("out").mkdir(exist_ok=True)
with open("out/diary.txt", "a") as diary:
    print(f"attempt {attempt} of version {VERSION}", file=diary)
with open("given.txt", "a") as given:
    print(attempt, file=given)
sys.exit(0 if attempt == 3 else 1)
"""


class TriesTwice(DriverAlone):
    """Its attempts run here, one after the other; the second that fails is the last."""

    server: Server

    def _train(self) -> None:
        for attempt in (self.attempt + 1, self.attempt + 2):
            self._event("started", attempt=attempt, world_size=1, step=0)
            (rank,) = group_of(self.workspace.directory, 1, attempt)
            run(self.server, [rank])
            if rank.status == "finished":
                return
        raise ShoalError("it failed twice")


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_a_script_writes_stays_for_the_next_attempt_after_resume_and_at_the_end(
    by_hand: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_without_ray(monkeypatch)
    project, run_directory = tmp_path / "project", tmp_path / "storage" / "jobs" / "own-1"
    project.mkdir()
    (project / "given.txt").write_text("as it came\n")

    def drive(version: int, *, by_hand: bool = False) -> int:
        """Submit the project, and run its driver in the folder that Ray has made of it."""
        (project / "train.py").write_text(f"VERSION = {version}\n{KEEPS_A_DIARY}")
        folder = tmp_path / f"package-{version}"
        if by_hand:
            shutil.copytree(project, folder)
        else:
            update_work(project, run_directory / WORK)
            folder.mkdir()
            (folder / RECORD).write_text("{}")
        monkeypatch.chdir(folder)
        driver = TriesTwice(job_of(1), Storage(tmp_path / "storage"))
        driver.server = server
        return driver.run()

    def written(name: str) -> list[str]:
        return (run_directory / WORK / name).read_text().splitlines()

    assert drive(1, by_hand=by_hand) == 1
    assert written("out/diary.txt") == ["attempt 1 of version 1", "attempt 2 of version 1"]
    assert drive(2) == 0
    assert written("out/diary.txt")[2:] == ["attempt 3 of version 2"]
    assert written("given.txt") == ["as it came", "1", "2", "3"], "it was changed by the script alone"
    assert {log.parent.name for log in run_directory.glob("logs/*/rank-0.log")} == {
        f"attempt-{attempt}" for attempt in (1, 2, 3)
    }
