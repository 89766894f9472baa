"""Logs from the command line: `logs`, of a job or of an app."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from infra.cli.common import FileOption, load, say

if TYPE_CHECKING:
    from cluster.config.loader import LoadedConfig
    from cluster.files.storage import Storage
    from infra.app_logs import AppLogs, Wanted
    from infra.log_lines import LogLine, Origin
    from infra.rank_output import RankLine
    from train_jobs.records.run_log import RunSummary

_LOOK_S = 1.0
Line = TypeVar("Line")


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("logs")(logs)


def logs(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="An app, or a job: its id, or a name for its newest one.")
    ],
    file: FileOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what comes: until the job ends, or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail", "-n", min=0, metavar="N", help="The last lines only (of an app: of each process)."
        ),
    ] = None,
    replica: Annotated[
        str | None, typer.Option("--replica", metavar="ID", help="Of this replica of an app only.")
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request", metavar="ID", help="Only what is about this request (x-request-id) to an app."
        ),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank", metavar="K", help="Only what this rank of a script printed, or `all` of them."
        ),
    ] = None,
    of_app: Annotated[bool, typer.Option("--app", help="NAME is an app, where a job has it too.")] = False,
    of_job: Annotated[bool, typer.Option("--job", help="NAME is a job, where an app has it too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document for each line instead of text.")
    ] = False,
) -> None:
    """Print what a job (rank 0 of a script too), or an app's gateway and replicas printed, ended ones too."""
    loaded = load(file, across=False)

    from cluster.errors import RequestError
    from infra.app_logs import Wanted

    if of_app and of_job:
        raise RequestError("--app and --job exclude each other")
    job = None if of_app or replica or request else _job(loaded, name)
    app_logs = None if of_job else _app_logs(loaded)
    apps = None if app_logs is None else app_logs.apps()
    if job is not None and apps is not None and name in apps:
        raise RequestError(f"{name} is an app and the name of a job; say which with --app or --job")
    if job is not None and rank is not None:
        _print_ranks(loaded, job, rank, follow, tail, as_json)
    elif job is not None:
        _print_job(loaded, job, follow, tail, as_json)
    elif app_logs is not None and apps is not None and name in apps:
        _print_app(app_logs, Wanted(name, replica, request, tail), follow, as_json)
    else:
        raise _nothing(loaded, name, apps, only_apps=of_app or bool(replica or request), only_jobs=of_job)


def _job(loaded: LoadedConfig, name: str) -> str | None:
    """The job of this id, or the newest of this name."""
    from cluster.errors import RequestError
    from infra.cli.train import storage_of
    from train_jobs.records.listing import find_job

    try:
        return find_job(storage_of(loaded), name)
    except RequestError:
        return None


def _app_logs(loaded: LoadedConfig) -> AppLogs | None:
    """The logs of the cluster's apps; None where it is not up."""
    from cluster.state.connection import head_is_silent, read_record
    from infra.app_logs import AppLogs

    record = read_record(loaded.config.cluster.name)
    return AppLogs(record) if record is not None and head_is_silent(record) is None else None


def _nothing(
    loaded: LoadedConfig, name: str, apps: list[str] | None, *, only_apps: bool, only_jobs: bool
) -> Exception:
    """Nothing has this name: what there is."""
    from cluster.errors import RequestError
    from infra.cli.train import storage_of
    from train_jobs.records.listing import job_ids

    jobs = job_ids(storage_of(loaded))[-10:]
    what = "no app" if only_apps else "no job" if only_jobs else "neither an app nor a job"
    there = []
    if not only_jobs:
        apps_there = f"the apps are {', '.join(apps)}" if apps else "nothing has been served"
        there.append(apps_there if apps is not None else f"cluster {loaded.config.cluster.name} is not up")
    if not only_apps:
        there.append(f"the last jobs are {', '.join(jobs)}" if jobs else "there are no jobs yet")
    return RequestError(f"there is {what} {name!r}; {'; '.join(there)}")


def _print_app(source: AppLogs, wanted: Wanted, follow: bool, as_json: bool) -> None:
    def emit(origin: Origin, line: LogLine) -> None:
        if as_json:
            request_id = line.request_id or wanted.request
            said = line.text if line.document is None else line.document
            _write_json({**origin.as_json(), "request_id": request_id, "line": said})
        else:
            _write("".join(f"{origin.prefix} {part}\n" for part in line.shown().splitlines()))
        if follow:
            sys.stdout.flush()

    if not follow:
        source.read(wanted, emit, say)
        return
    with suppress(KeyboardInterrupt):  # how following ends
        source.follow(wanted, emit, say)


def _print_job(loaded: LoadedConfig, job: str, follow: bool, tail: int | None, as_json: bool) -> None:
    from cluster.errors import RequestError
    from infra.cli.train import goodput_line, storage_of, submissions_of
    from train_jobs.records.listing import account_of, is_running, run_of
    from train_jobs.records.run_log import summarize

    storage = storage_of(loaded)
    summary = summarize(job, run_of(storage, job))
    if _is_script(storage, summary):
        _print_script(loaded, summary, follow, tail, as_json)
        return
    submission_id = summary.submission_id
    if submission_id is None:
        raise RequestError(
            f"{job} was not submitted through Ray's job API, which keeps what drivers print; what happened to"
            f" it is in {run_of(storage, job).location}, in events.jsonl"
        )
    submissions = submissions_of(loaded)
    past = submissions.logs(submission_id) if tail is not None or not follow else ""
    lines = past.splitlines(keepends=True)
    skipped = 0 if tail is None else max(0, len(lines) - tail)
    try:
        for text in submissions.follow_logs(submission_id) if follow else [past]:
            for line in text.splitlines(keepends=True):
                if skipped:
                    skipped -= line.endswith("\n")
                elif as_json:
                    _write_json({"source": "job", "line": line.rstrip("\n")})
                else:
                    _write(line)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return  # how following ends
    runs = not follow and is_running(summary, submissions.statuses())
    if line := goodput_line(account_of(storage, job, runs=runs).as_json()):
        say(line)


def _is_script(storage: Storage, summary: RunSummary) -> bool:
    """Whether a job is a script; until its driver has said so, its config does."""
    from train_jobs.records.run_config import read_run_config

    return (summary.task or read_run_config(storage, summary.job)[1].task) == "script"


def _print_script(
    loaded: LoadedConfig, summary: RunSummary, follow: bool, tail: int | None, as_json: bool
) -> None:
    """What the driver of a script says, and what its rank 0 prints, as `shoal train` shows it."""
    from infra.cli.train import goodput_line, ranks_line, storage_of
    from infra.script_log import ScriptLog
    from train_jobs.records.listing import account_of, run_of

    storage, job = storage_of(loaded), summary.job
    run = run_of(storage, job)
    log = ScriptLog(run, *_driver_of(loaded, summary, run))

    def look() -> tuple[list[str | RankLine], bool]:
        lines = list(log.new(last=not follow))
        return lines, log.runs

    def write(line: str | RankLine) -> None:
        if isinstance(line, str):
            _write_said(line, as_json)
        else:
            _write_printed(line, as_json)

    if not _show(look, follow, tail, write):
        return
    if line := goodput_line(account_of(storage, job, runs=log.runs).as_json()):
        say(line)
    if line := ranks_line(job, run.location):
        say(line)


def _driver_of(
    loaded: LoadedConfig, summary: RunSummary, run: Storage
) -> tuple[Callable[[], str], Callable[[], str | None]]:
    """What asks for all that the driver has printed, and for Ray's status of it.

    What the ranks printed is had without it; then it is said why there is nothing of the driver.
    """
    from infra.cli.train import submissions_if_up

    submissions, submission_id = submissions_if_up(loaded), summary.submission_id
    if submissions is None:
        why = f"cluster {loaded.config.cluster.name} is not up"
    elif submission_id is None:
        why = "it was not submitted through Ray's job API, which keeps that"
    elif submissions.status(submission_id) is None:
        why = "Ray does not know it any more"
    else:
        return partial(submissions.logs, submission_id), partial(submissions.status, submission_id)
    say(
        f"what the driver of {summary.job} printed cannot be had: {why}; what happened to it is in"
        f" {run.location}, in events.jsonl"
    )
    return lambda: "", lambda: None


def _print_ranks(
    loaded: LoadedConfig, job: str, rank: str, follow: bool, tail: int | None, as_json: bool
) -> None:
    """What ranks of a script printed; with several of them each line begins with its rank."""
    from cluster.errors import RequestError
    from infra.cli.train import storage_of, submissions_if_up
    from infra.rank_output import RankOutput
    from train_jobs.records.listing import is_running, run_of
    from train_jobs.records.run_log import RunFollower

    if rank != "all" and not rank.isdecimal():
        raise RequestError(f"--rank is a number, or `all`, not {rank!r}")
    storage = storage_of(loaded)
    run = run_of(storage, job)
    follower = RunFollower(job, run)
    if not _is_script(storage, follower.look()):
        raise RequestError(f"{job} is no script: its ranks print nothing; `shoal logs {job}` has its log")
    output = RankOutput(run, None if rank == "all" else int(rank))
    submissions = submissions_if_up(loaded) if follow else None

    def look() -> tuple[list[RankLine], bool]:
        runs = submissions is not None and is_running(follower.look(), submissions.statuses())
        return list(output.new(last=not runs)), runs

    _show(look, follow, tail, lambda line: _write_printed(line, as_json, named=rank == "all"))


def _show(
    look: Callable[[], tuple[list[Line], bool]], follow: bool, tail: int | None, write: Callable[[Line], None]
) -> bool:
    """Write the lines that are there, and with `follow` those that come, to the end of the job.

    Args:
        look: the lines that are new, and whether more may come.
        tail: how many of those that are there already.

    Returns:
        whether it came to its end; Ctrl-C is how following ends else.
    """
    try:
        lines, runs = look()
        for line in lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]:
            write(line)
        while follow and runs:
            sys.stdout.flush()
            threading.Event().wait(_LOOK_S)
            lines, runs = look()
            for line in lines:
                write(line)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return False
    return True


def _write_said(line: str, as_json: bool) -> None:
    """Write what a driver printed."""
    if as_json:
        _write_json({"source": "job", "line": line})
    else:
        _write(f"{line}\n")


def _write_printed(line: RankLine, as_json: bool, *, named: bool = False) -> None:
    """Write what a rank printed.

    Args:
        named: it begins with its rank.
    """
    if as_json:
        _write_json({"source": "rank", "attempt": line.attempt, "rank": line.rank, "line": line.text})
    else:
        _write(f"rank {line.rank}: {line.text}\n" if named else f"{line.text}\n")


def _write_json(document: dict[str, Any]) -> None:
    _write(json.dumps(document) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
