"""What a job has printed: its driver, and the ranks of a script."""

from __future__ import annotations

from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from infra.job_account import goodput_line, ranks_line
from infra.rank_output import RankLine, RankOutput
from infra.script_log import ScriptLog
from train_jobs.driver.submission import Submissions
from train_jobs.records.job_status import is_running
from train_jobs.records.listing import account_of, run_of
from train_jobs.records.run_config import read_run_config
from train_jobs.records.run_log import RunFollower, RunSummary

SAID = "said"
"""Key of the driver's lines; that of a rank's is ATTEMPT-RANK."""
Printed = tuple[str, dict[str, Any]]
"""A line, with the key of the log it is from, as `shoal logs --json` prints it."""


class JobOutput:
    """What a job has printed, and what it prints.

    Args:
        storage: the cluster's.
        job: its id.
        rank: only what this rank of a script printed, or `all` of them.
        submissions: Ray's job API; None where the cluster is not up.
        name: the cluster's.

    Attributes:
        runs: whether more may come, at the last look.
        notes: what cannot be had, and why.

    Raises:
        RequestError: it is no rank, or the job is no script, or was not submitted through Ray's job API.
        ShoalError: the cluster is not up, which alone has what was printed.
    """

    def __init__(
        self, storage: Storage, job: str, rank: str | None, submissions: Submissions | None, name: str
    ) -> None:
        if rank is not None and rank != "all" and not (rank.isascii() and rank.isdecimal()):
            raise RequestError(f"--rank is a number, or `all`, not {rank!r}")
        self.notes: list[str] = []
        self.runs = True
        self._storage, self._job, self._rank = storage, job, rank
        self._submissions = submissions
        run = run_of(storage, job)
        self._follower = RunFollower(job, run)
        summary = self._follower.look()
        self._scripted = _is_script(storage, summary)
        if rank is not None and not self._scripted:
            raise RequestError(f"{job} is no script: its ranks print nothing; `shoal logs {job}` has its log")
        self._output = RankOutput(run, None if rank in (None, "all") else int(rank))
        self._log = None if rank is not None else ScriptLog(run, self._said, self._status)
        self._submission_id = summary.submission_id
        self._away = None if rank is not None else self._why_away(name)
        if self._away is not None:
            if not self._scripted:
                raise RequestError(self._away) if summary.submission_id is None else ShoalError(self._away)
            self.notes.append(self._away)

    def new(self, *, last: bool = False) -> list[Printed]:
        """The lines since the last call, which count in `runs`.

        Args:
            last: nobody asks again: a line without its end is one too.
        """
        if self._log is not None:
            lines = list(self._log.new(last=last))
            self.runs = self._log.runs
            return [_printed(line) for line in lines]
        statuses = None if self._submissions is None else self._submissions.statuses()
        self.runs = is_running(self._follower.look(), statuses)
        return [_printed(line) for line in self._output.new(last=last or not self.runs)]

    def closing(self) -> list[str]:
        """What is said at the end: where the job's time went, and where the rest is."""
        if self._rank is not None:
            return []
        run = run_of(self._storage, self._job)
        account = account_of(self._storage, self._job, runs=self.runs).as_json()
        lines = [goodput_line(account), ranks_line(self._job, run.location) if self._scripted else ""]
        return [line for line in lines if line]

    def _why_away(self, name: str) -> str | None:
        """Why what the driver printed cannot be had."""
        if self._submissions is None:
            why = f"cluster {name} is not up"
        elif self._submission_id is None:
            why = "it was not submitted through Ray's job API, which keeps that"
        elif self._submissions.status(self._submission_id) is None:
            why = "Ray does not know it any more"
        else:
            return None
        return (
            f"what the driver of {self._job} printed cannot be had: {why}; what happened to it is in"
            f" {run_of(self._storage, self._job).location}, in events.jsonl"
        )

    def _said(self) -> str:
        if self._away is not None or self._submissions is None or self._submission_id is None:
            return ""
        return self._submissions.logs(self._submission_id)

    def _status(self) -> str | None:
        if self._away is not None or self._submissions is None or self._submission_id is None:
            return None
        return self._submissions.status(self._submission_id)


def _is_script(storage: Storage, summary: RunSummary) -> bool:
    """Whether a job is a script; until its driver has said so, its config does."""
    return (summary.task or read_run_config(storage, summary.job)[1].task) == "script"


def _printed(line: str | RankLine) -> Printed:
    if isinstance(line, str):
        return SAID, {"source": "job", "line": line}
    return f"{line.attempt}-{line.rank}", line.as_json()
