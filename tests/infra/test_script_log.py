"""What the driver of a script says and what its rank 0 prints, as one log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.files.storage import Storage
from infra.script_log import ScriptLog


class Job:
    """A run's directory, and its driver."""

    def __init__(self, run: Path) -> None:
        self.run, self.said, self.status = run, "", "RUNNING"

    def prints(self, attempt: int, text: str, rank: int = 0) -> None:
        log = self.run / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(text)

    def tells(self, **event: Any) -> None:
        with (self.run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": "2026-01-01T00:00:00+00:00", **event}) + "\n")

    def log(self) -> ScriptLog:
        return ScriptLog(Storage(self.run), lambda: self.said, lambda: self.status)


def lines(log: ScriptLog, *, last: bool = False) -> list[str]:
    return [
        line if isinstance(line, str) else f"{line.attempt}/{line.rank} {line.text}"
        for line in log.new(last=last)
    ]


def test_an_attempts_lines_stand_before_the_line_that_says_how_it_ended(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.said = (
        "preparing task=script\nwaiting min=1 max=1\nleased workers=1\nfailed attempt=1 rank=0\n"
        "where rank 0 stood:\nwaiting min=1 max=1\nleased workers=1\nrecovered attempt=2\n"
    )
    job.prints(1, "step 1\n")
    job.prints(1, "of rank 1\n", rank=1)
    job.prints(2, "step 2\n")
    log = job.log()
    assert lines(log) == [
        *("preparing task=script", "waiting min=1 max=1", "leased workers=1", "1/0 step 1"),
        *("failed attempt=1 rank=0", "where rank 0 stood:", "waiting min=1 max=1", "leased workers=1"),
        *("recovered attempt=2", "2/0 step 2"),
    ]
    job.said += "trained command=x\nfinished status=succeeded\n"
    job.prints(2, "step 3\n")
    assert lines(log) == ["2/0 step 3", "trained command=x", "finished status=succeeded"]
    assert lines(log) == []


def test_attempts_before_the_job_was_resumed_are_what_came_first(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for attempt in (1, 2, 3):
        if attempt != 2:
            job.tells(kind="submitted", name="own", steps=0, submission_id=f"own-{attempt}")
        job.tells(kind="started", attempt=attempt, world_size=1, step=0)
        job.prints(attempt, f"began {attempt}\n")
    job.said = "preparing task=script\nleased workers=1\nfinished status=stopped\n"
    assert lines(job.log()) == [
        *("1/0 began 1", "2/0 began 2"),
        *("preparing task=script", "leased workers=1", "3/0 began 3", "finished status=stopped"),
    ]


def test_a_line_is_one_when_its_end_is_there_or_nothing_more_is_coming(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.said, log = "preparing ta", job.log()
    job.prints(1, "step")
    assert (lines(log), log.runs) == ([], True)
    assert lines(job.log(), last=True) == ["preparing ta", "1/0 step"]
    job.said += "sk=script\nfinis"
    job.prints(1, " 1\nste")
    assert lines(log) == ["preparing task=script", "1/0 step 1"]
    job.said, job.status = job.said + "hed status=failed", "FAILED"
    assert lines(log) == ["1/0 ste", "finished status=failed"]
    assert not log.runs


def test_what_is_written_while_the_driver_ends_is_not_lost(tmp_path: Path) -> None:
    """First it is asked whether the driver is there, then what it wrote is read, then what that tells of."""
    job = Job(tmp_path)

    def status() -> str:
        job.said = "finished status=succeeded\n"
        return "SUCCEEDED"

    def said() -> str:
        job.prints(1, "saved\n")
        return job.said

    log = ScriptLog(Storage(tmp_path), said, status)
    assert lines(log) == ["1/0 saved", "finished status=succeeded"]
