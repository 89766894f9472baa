"""`shoal logs` of a job that is a script: what its rank 0 prints is among what Shoal says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from infra.api import log_stream
from infra.app_logs import AppLogs
from infra.cli.main import call
from tests.served_api import RayJobs, control, served, up_here
from train_jobs.records.run_config import write_run_config

JOB = "own-20260101-000000-abcd"
BEFORE = ["preparing task=script", "waiting min=2 max=2", "leased workers=2 nodes=['n']"]
AFTER = ["trained command=x", "finished status=succeeded step=0 exit_code=0"]


class Run(RayJobs):
    """A job as its files and Ray tell of it.

    Attributes:
        moments: what happens whenever it is asked whether the driver runs; one each time, in their order.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.said, self.status_now = "", "RUNNING"
        self.moments: list[Callable[[], object]] = []

    def prints(self, text: str, rank: int = 0, attempt: int = 1) -> None:
        log = self.directory / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(text)

    def tells(self, second: int, kind: str, **facts: Any) -> None:
        with (self.directory / "events.jsonl").open("a") as file:
            time = f"2026-01-01T00:00:{second:02}.000+00:00"
            file.write(json.dumps({"time": time, "kind": kind, **facts}) + "\n")

    def says(self, *lines: str) -> None:
        self.said += "".join(f"{line}\n" for line in lines)

    def begins(self) -> None:
        self.tells(1, "preparing", task="script")
        self.tells(2, "leased", workers=2, nodes=["n"])
        self.tells(4, "started", attempt=1, world_size=2, step=0)
        self.says(*BEFORE)

    def ends(self) -> None:
        self.tells(12, "finished", status="succeeded", step=0, exit_code=0)
        self.says(*AFTER)
        self.status_now = "SUCCEEDED"

    # Ray's job API

    def statuses(self) -> dict[str, str]:
        if self.moments:
            self.moments.pop(0)()
        return {JOB: self.status_now}

    def status(self, submission_id: str) -> str | None:
        return self.statuses().get(submission_id)

    def logs(self, submission_id: str) -> str:
        assert submission_id == JOB
        return self.said


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Run:
    """One that was just submitted, on a cluster that is not up."""
    (tmp_path / "shoal.yaml").write_text("cluster: {name: lab, storage: ./kept}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_CONFIG", raising=False)
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path_factory.mktemp("home")))
    config = TrainJobConfig.model_validate({"task": "script", "script": "train.py"})
    write_run_config(Storage(tmp_path / "kept"), JOB, "own", config)
    made = Run(tmp_path / "kept" / "jobs" / JOB)
    made.tells(0, "submitted", name="own", steps=0, submission_id=JOB)
    return made


@pytest.fixture
def up(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The same on a cluster that is, and has served nothing."""
    monkeypatch.setattr(log_stream, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(AppLogs, "apps", lambda self: [])
    lab = control(Storage(tmp_path / "kept"), run)
    with served(lab) as port:
        up_here("lab", lab, port)
        yield run


def test_rank_0_is_shown_among_what_shoal_says_and_where_the_rest_is_at_the_end(
    up: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    up.begins()
    up.prints("step 1\nsaved")
    up.prints("of rank 1\n", rank=1)
    up.ends()
    assert call(["logs", "own"]) == 0
    out, error = capsys.readouterr()
    assert out.splitlines() == [*BEFORE, "step 1", "saved", *AFTER]
    assert error.splitlines() == [
        "no step was logged in 10.0 s: starting 10.0 s",
        f"what its ranks printed: {up.directory}/logs; `shoal logs {JOB} --rank all`",
    ]
    assert call(["logs", JOB, "--tail", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["saved", *AFTER]
    assert call(["logs", "own", "--tail", "4", "--json"]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert documents == [
        {"source": "rank", "attempt": 1, "rank": 0, "line": "step 1"},
        {"source": "rank", "attempt": 1, "rank": 0, "line": "saved"},
        *({"source": "job", "line": line} for line in AFTER),
    ]


def test_it_is_followed_from_before_its_driver_has_begun_to_its_end(
    up: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[list[str]] = []

    def look() -> None:
        shown.append(capsys.readouterr().out.splitlines())

    def nothing() -> None: ...

    def steps() -> None:
        look()
        up.prints("step 1\nst")

    def ends() -> None:
        look()
        up.prints("ep 2\nlast")
        up.ends()

    # The first is asked only whether Ray knows it.
    up.moments = [nothing, nothing, up.begins, steps, ends]
    assert call(["logs", "own", "--follow"]) == 0
    out, error = capsys.readouterr()
    assert [*shown, out.splitlines()] == [BEFORE, ["step 1"], ["step 2", "last", *AFTER]]
    assert error.splitlines()[-1].startswith(f"what its ranks printed: {up.directory}/logs; ")


def test_of_one_that_runs_all_is_shown_that_is_there(up: Run, capsys: pytest.CaptureFixture[str]) -> None:
    up.begins()
    up.prints("step 1\n 10%|#")
    assert call(["logs", "own"]) == 0
    assert capsys.readouterr().out.splitlines() == [*BEFORE, "step 1", " 10%|#"]


def test_without_its_driver_there_is_what_rank_0_printed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.begins()
    run.prints("step 1\n")
    for more in ([], ["--follow"]):
        assert call(["logs", "own", *more]) == 0
        out, error = capsys.readouterr()
        assert out == "step 1\n"
        assert f"what the driver of {JOB} printed cannot be had: cluster " in error
        assert f" is not up; what happened to it is in {run.directory}, in events.jsonl\n" in error


def test_without_its_driver_in_ray_there_is_what_rank_0_printed(
    up: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    up.begins()
    up.prints("step 1\n")
    monkeypatch.setattr(up, "statuses", dict)
    assert call(["logs", "own"]) == 0
    out, error = capsys.readouterr()
    assert (out, "cannot be had: Ray does not know it any more; " in error) == ("step 1\n", True)


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        ("0", ["step 1", "step 2"]),
        ("1", ["of rank 1"]),
        ("all", ["rank 0: step 1", "rank 1: of rank 1", "rank 0: step 2"]),
        ("7", []),
    ],
)
def test_a_rank_by_itself_or_all_of_them(
    rank: str, said: list[str], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.begins()
    run.prints("step 1\n")
    run.prints("of rank 1", rank=1)
    run.prints("step 2\n", attempt=2)
    for more in ([], ["--follow"]):  # there is nobody to wait for
        assert call(["logs", "own", "--rank", rank, *more]) == 0
        assert capsys.readouterr() == ("".join(f"{line}\n" for line in said), "")
    assert call(["logs", "own", "--rank", rank, "--json", "--tail", "1"]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["line"] for document in documents] == [line.split(": ")[-1] for line in said[-1:]]
    assert {document["source"] for document in documents} <= {"rank"}


def test_a_rank_by_itself_is_followed_from_the_start_to_the_end(
    up: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def begins() -> None:
        up.begins()
        up.prints("step 1\nst")
        up.prints("of rank 1\n", rank=1)

    def ends() -> None:
        shown.append(capsys.readouterr().out)
        up.prints("ep 2")
        up.ends()

    up.moments = [lambda: None, begins, ends]
    assert call(["logs", "own", "--rank", "0", "--follow"]) == 0
    assert [*shown, capsys.readouterr().out] == ["step 1\n", "step 2\n"]


@pytest.mark.parametrize("rank", ["-1", "one", ""])
def test_what_is_no_rank_is_refused(rank: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["logs", "own", f"--rank={rank}"]) == 2
    assert f"--rank is a number, or `all`, not {rank!r}" in capsys.readouterr().err


def test_of_a_job_that_is_no_script_there_is_what_its_driver_says(
    up: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    up.tells(1, "preparing", task="causal_lm")
    up.says("preparing task=causal_lm")
    up.status_now = "SUCCEEDED"
    assert call(["logs", "own"]) == 0
    assert capsys.readouterr() == ("preparing task=causal_lm\n", "")
    assert call(["logs", "own", "--rank", "0"]) == 2
    assert f"{JOB} is no script: its ranks print nothing" in capsys.readouterr().err
