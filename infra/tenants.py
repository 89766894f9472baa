"""Jobs and apps of a cluster whose nodes have to go, and may come back; or go for good.

python -m infra.tenants leave|come-back|end -f FILE
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from cluster.config.loader import load_config
from cluster.errors import ShoalError
from cluster.files.storage import Storage
from cluster.state.connection import ClusterRecord, connect, disconnect, read_record
from cluster.state.health import wait_until
from infra.api.jobs import Jobs
from infra.lifecycle import end_tenants
from infra.tenant_book import TenantBook
from serve_apps.commands import deploy_specs, served_specs, start_serve
from serve_apps.spec import AppSpec
from train_jobs.driver.submission import Submissions
from train_jobs.records.job_status import is_running
from train_jobs.records.listing import run_of, summaries
from train_jobs.records.run_log import RunSummary, summarize

SERVE_START_S = 120.0
READY_S = 600.0
JOB_API_S = 60.0
LOST_S = 150.0
"""Longest until Ray takes drivers for lost that were on the head before: by its defaults it needs 65 s."""
LOOK_S = 0.5
RETRY_S = 10.0
"""Between two tries to serve again: each is a new revision of the apps that failed."""

Say = Callable[[str], None]


def leave(record: ClusterRecord, book: TenantBook, say: Say) -> None:
    """Have every job save and stop, and every app finish its requests and end; what is needed to go on with
    them is kept.

    Raises:
        ShoalError: a job did not stop in time.
    """
    connect(record)
    try:
        statuses = Submissions(record).statuses()
        running = [each.job for each in summaries(Storage(record.storage)) if is_running(each, statuses)]
        specs = served_specs()
        if specs is not None:
            book.keep_apps(specs)
        book.close(running)
    finally:
        disconnect()
    end_tenants(record, say)


def come_back(record: ClusterRecord, book: TenantBook, say: Say) -> None:
    """Go on with the jobs that were stopped, or lost, with the nodes; serve the apps that were served.

    Raises:
        ShoalError: not all of them; the message names those that do not go on.
    """
    book.close(book.left())  # what is kept stays until all of it is back
    connect(record)
    try:
        problems = _resume_jobs(record, book, say) + _serve_apps(book, say)
    finally:
        disconnect()
    book.open()
    if problems:
        raise ShoalError("; ".join(problems))


def _resume_jobs(record: ClusterRecord, book: TenantBook, say: Say) -> list[str]:
    storage = Storage(record.storage)
    left = {}
    for job in book.jobs():
        left[job] = summarize(job, run_of(storage, job))
        if left[job].ended and not (job in book.left() and left[job].status == "stopped"):
            book.forget_job(job)
            del left[job]
    if not left:
        return []
    try:
        submissions = _job_api(record)
    except ShoalError as error:
        return [str(error)]
    # One that runs all the same has lost nothing.
    running = {job for job, summary in left.items() if not _is_lost(submissions, summary)}
    cluster = load_config(Path(record.config_path), across=False).resolved.cluster
    jobs = Jobs(cluster, storage, lambda: submissions, lambda: ())
    problems = []
    for job in sorted(left.keys() - running):
        try:
            with book.job(job) as kept:
                plan = jobs.plan_to_resume(job, (), Path("/"))
                jobs.resume(plan, kept.package, kept.environment)
            say(f"{job}: {plan.said[-1]}")
        except ShoalError as error:
            problems.append(f"{job}: {error}")
    return problems


def _job_api(record: ClusterRecord) -> Submissions:
    """Ray's job API, once it answers.

    Raises:
        ShoalError: it does not.
    """
    deadline = time.monotonic() + JOB_API_S
    while True:
        try:
            submissions = Submissions(record)
            submissions.statuses()
            return submissions
        except ShoalError:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOOK_S)


def _is_lost(submissions: Submissions, summary: RunSummary) -> bool:
    """Whether nobody does this job any more, which may be said only after a while."""

    def is_said() -> bool:
        with suppress(ShoalError):
            return not is_running(summary, submissions.statuses())
        return False

    return wait_until(is_said, LOST_S, LOOK_S)


def _serve_apps(book: TenantBook, say: Say) -> list[str]:
    from cluster.sharing.client import BrokerClient

    specs = [AppSpec.from_json(spec) for spec in book.apps()]
    if not specs:
        return []
    say(f"serving {', '.join(spec.name for spec in specs)} again")
    deadline = time.monotonic() + READY_S
    try:
        start_serve(BrokerClient().info(), time.monotonic() + SERVE_START_S, say)
    except ShoalError as error:
        return [str(error)]
    while True:
        try:
            deploy_specs(specs, deadline=deadline, say=say)
            return []
        except ShoalError as error:
            if time.monotonic() > deadline:
                return [str(error)]
            # Other nodes may come back later than the head: what finds no room is given up after a while.
            say(f"{error}; it is tried again")
        time.sleep(RETRY_S)


def main(arguments: Sequence[str]) -> int:
    """Do one of them; the exit code."""
    parser = argparse.ArgumentParser(prog="infra.tenants")
    parser.add_argument("what", choices=("leave", "come-back", "end"))
    parser.add_argument("-f", dest="file", required=True)
    asked = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        record = read_record(load_config(Path(asked.file), across=False).config.cluster.name)
        if record is None:
            return 0  # it was taken down by itself: nobody uses it
        book = TenantBook.of_this_cluster()
        if asked.what == "end":
            end_tenants(record, say)
            if book is not None:
                book.forget()
            return 0
        if book is None:
            raise ShoalError("the nodes of this cluster stay: nothing is kept of its jobs and apps")
        (leave if asked.what == "leave" else come_back)(record, book, say)
    except ShoalError as error:
        say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
