"""Training from the command line: `train`, `jobs`, `stop`, `resume`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.common import FileOption, JobArgument, JsonOption, SetOption, load, print_json, say

if TYPE_CHECKING:
    from cluster.config.loader import LoadedConfig
    from cluster.files.storage import Storage
    from cluster.state.connection import ClusterRecord
    from infra.job_logs import JobLogs
    from train_jobs.driver.package import Package
    from train_jobs.driver.submission import Submissions

STOP_TIMEOUT_S = 150.0
"""More than Ray gives a driver between SIGTERM and SIGKILL."""
_STOP_LOOK_S = 0.3

DetachOption = Annotated[bool, typer.Option("--detach", help="Submit, and do not wait for the end.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    for command in (train, jobs, stop, resume):
        app.command(command.__name__)(command)


def train(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A job of the config.")],
    file: FileOption = None,
    settings: SetOption = None,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a training job and follow it to its end."""
    loaded = load(file, settings, f"train_jobs.{name}")

    from cluster.files.storage import Storage
    from cluster.state.connection import require_record
    from train_jobs.driver.submission import Submissions, new_job_id

    record = require_record(loaded.config.cluster.name)
    storage = Storage(record.storage)
    submissions = Submissions(record)
    job = new_job_id(name)
    config = loaded.resolved.train_jobs[name]
    _say_what_travels(submissions.submit(storage, job, name, config, job, loaded.base))
    _after_submission(submissions, storage, job, job, detach, as_json)


def jobs(file: FileOption = None, as_json: JsonOption = False) -> None:
    """List all jobs of the cluster's storage, oldest first; works without a running cluster."""
    loaded = load(file, across=False)

    from train_jobs.records.listing import list_jobs

    rows = list_jobs(storage_of(loaded), _driver_statuses(loaded))
    if as_json:
        print_json(rows)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from infra.job_view import step_of

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("job", no_wrap=True)  # what people copy; it holds the time of the submission
    for heading in ("status", "step", "workers", "attempts", "goodput"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("status", "step"))
    for row in rows:
        steps = step_of(row["step"], row["steps"])
        workers, attempts = str(row["workers"]), str(row["attempts"])
        goodput = "" if row["goodput"] is None else f"{row['goodput']:.0%}"
        table.add_row(row["job"], row["status"], steps, workers, attempts, goodput)
    Console().print(table if rows else "no jobs yet")


def stop(job: JobArgument, file: FileOption = None, as_json: JsonOption = False) -> None:
    """Stop a job: its workers save at the next step boundary and leave."""
    loaded = load(file, across=False)

    from cluster.errors import RequestError, ShoalError
    from train_jobs.driver.submission import record_end
    from train_jobs.records.listing import RAY_ENDED, find_job, is_running, result_of, run_of
    from train_jobs.records.run_log import RunFollower

    storage = storage_of(loaded)
    submissions = submissions_of(loaded)
    statuses = submissions.statuses()
    found = find_job(storage, job, prefer=lambda summary: is_running(summary, statuses))
    follower = RunFollower(found, run_of(storage, found))
    summary = follower.look()
    if not is_running(summary, statuses) or summary.submission_id is None:
        raise RequestError(f"{found} does not run: it {_ended(summary.status)}")
    submission_id = summary.submission_id
    submissions.stop(submission_id)
    deadline, pause = time.monotonic() + STOP_TIMEOUT_S, threading.Event()
    while True:
        driver = submissions.status(submission_id)  # before the look at what it wrote
        if (ended := follower.look()).ended:
            break
        if driver in RAY_ENDED:
            record_end(storage, found, "stopped", "its driver was killed before it could say how it ended")
            continue
        if time.monotonic() > deadline:
            raise ShoalError(f"{found} did not stop within {STOP_TIMEOUT_S:.0f} s")
        pause.wait(_STOP_LOOK_S)
    if as_json:
        print_json(result_of(storage, found))
    else:
        typer.echo(f"{found} {_ended(ended.status)} at step {ended.step}")


def resume(
    job: JobArgument,
    file: FileOption = None,
    settings: SetOption = None,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with a job that ended early, from its newest checkpoint; --set changes its settings."""
    loaded = load(file, across=False)

    from cluster.config.loader import RUN_FILE, change_job
    from cluster.errors import RequestError
    from infra.job_logs import JobLogs
    from train_jobs.checkpoint.store import CheckpointStore
    from train_jobs.records.listing import find_job, is_running, run_of
    from train_jobs.records.run_config import changes, read_run_config
    from train_jobs.records.run_log import summarize
    from train_jobs.spec import CHECKPOINTS, command_digest

    storage = storage_of(loaded)
    found = find_job(storage, job)
    run = run_of(storage, found)
    summary = summarize(found, run)
    submissions = submissions_of(loaded)
    if is_running(summary, submissions.statuses()):
        raise RequestError(f"{found} runs: it is at step {summary.step}")
    name, before = read_run_config(storage, found)
    config = before
    if settings:
        config = change_job(run.read_bytes(RUN_FILE).decode(), name, settings, loaded)
    changed = changes(before, config)
    scripted = config.task == "script"
    has_trained = scripted and summary.trained == command_digest(config)
    if summary.status == "succeeded" and has_trained:
        raise RequestError(
            f"the script of {found} has succeeded, and is not run again; `shoal train {name}` starts anew"
        )
    if summary.status == "succeeded" and not scripted and config.steps <= summary.step:
        raise RequestError(
            f"{found} has done all its {summary.step} steps; --set steps=N with more steps goes on from there"
        )
    for change in changed:
        say(f"changed {change}")
    if has_trained:
        say("its script has succeeded: what is left is to publish the model")
    elif scripted:
        say("its script starts again, and goes on from what it has saved")
    else:
        newest = CheckpointStore(run.child(CHECKPOINTS)).newest()
        say("begins at step 0: there is no checkpoint" if newest is None else f"goes on from step {newest}")
    logs = JobLogs(run, found)
    logs.show()  # what it did before is told already
    submission_id = f"{found}-{time.strftime('%H%M%S', time.gmtime())}"
    _say_what_travels(submissions.submit(storage, found, name, config, submission_id, loaded.base))
    _after_submission(submissions, storage, found, submission_id, detach, as_json, logs)


def _say_what_travels(package: Package) -> None:
    for sentence in package.sentences():
        say(sentence)


def _after_submission(
    submissions: Submissions,
    storage: Storage,
    job: str,
    submission_id: str,
    detach: bool,
    as_json: bool,
    logs: JobLogs | None = None,
) -> None:
    """Say that the job was submitted, and unless detached follow it.

    Exits 1 when it did not succeed, 2 when the request was wrong in a way that only the job could see.
    """
    if detach:
        if as_json:
            print_json({"job": job, "submission_id": submission_id})
        else:
            typer.echo(f"submitted {job}; `shoal jobs` lists it, `shoal logs {job} --follow` follows it")
        return
    say(f"submitted {job}")
    result = follow_job(submissions, storage, job, submission_id, logs)
    if as_json:
        print_json(result)
    else:
        _print_result(result)
    if result["status"] != "succeeded":
        from train_jobs.records.listing import run_of
        from train_jobs.records.run_log import summarize

        raise typer.Exit(summarize(job, run_of(storage, job)).exit_code)


def follow_job(
    submissions: Submissions, storage: Storage, job: str, submission_id: str, logs: JobLogs | None = None
) -> dict[str, Any]:
    """Show a job until it has ended; the document that `shoal train` returns.

    Args:
        logs: with what need not be shown taken in.
    """
    from infra.job_logs import JobLogs, follow
    from infra.job_view import view_for
    from train_jobs.records.listing import result_of, run_of
    from train_jobs.records.run_log import summarize

    run = run_of(storage, job)
    steps = summarize(job, run).steps
    try:
        with view_for(job, steps) as view:
            logs = logs or JobLogs(run, job)
            died = follow(logs, lambda: submissions.status(submission_id), view)
    except KeyboardInterrupt:
        say(f"\n{job} goes on without us; `shoal stop {job}` stops it")
        raise
    if died is None:
        return result_of(storage, job)
    status = "stopped" if died == "STOPPED" else "failed"
    return result_of(storage, job, status, f"the driver ended: {submissions.message(submission_id)}")


def _print_result(result: dict[str, Any]) -> None:
    if result["error"]:
        say(result["error"])
    typer.echo(f"{result['job']} {_ended(result['status'])} at step {result['step']}")
    if result["evaluation"]:
        means = (
            f"{name} {value:.4f}" for name, value in result["evaluation"].items() if isinstance(value, float)
        )
        typer.echo(f"held-out {', '.join(means)}")
    if result["model"]:
        typer.echo(f"published as {result['model']}")
    if line := goodput_line(result):
        typer.echo(line)
    typer.echo(f"files: {result['path']}")
    if line := ranks_line(result["job"], result["path"]):
        typer.echo(line)


def ranks_line(job: str, path: str) -> str:
    """Where all is that the ranks of a script printed; nothing of a job whose ranks print nothing.

    Args:
        path: the job's directory.
    """
    logs = Path(path) / "logs"
    return f"what its ranks printed: {logs}; `shoal logs {job} --rank all`" if logs.is_dir() else ""


def goodput_line(account: dict[str, Any]) -> str:
    """Where a job's time went, the greatest loss first; nothing of a job that never had a lease."""
    if not account["wall_s"]:
        return ""
    losses = sorted(account["losses_s"].items(), key=lambda item: -item[1])
    words = [
        f"{cause.removeprefix('after_')} failures {seconds:.1f} s"
        if cause.startswith("after_")
        else f"{cause} {seconds:.1f} s"
        for cause, seconds in losses
        if seconds >= 0.05
    ]
    if account["goodput"] is None:
        return f"no step was logged in {account['wall_s']:.1f} s: {', '.join(words)}"
    lost = f"; lost to {', '.join(words)}" if words else ""
    useful = f"{account['useful_s']:.1f} s of useful steps in {account['wall_s']:.1f} s"
    return f"goodput {account['goodput']:.1%}: {useful}{lost}"


def _ended(status: str) -> str:
    return {"stopped": "was stopped"}.get(status, status)


def storage_of(loaded: LoadedConfig) -> Storage:
    from cluster.files.storage import Storage

    return Storage(loaded.resolved.cluster.storage)


def _record(loaded: LoadedConfig) -> ClusterRecord:
    from cluster.state.connection import require_record

    return require_record(loaded.config.cluster.name)


def submissions_of(loaded: LoadedConfig) -> Submissions:
    from train_jobs.driver.submission import Submissions

    return Submissions(_record(loaded))


def submissions_if_up(loaded: LoadedConfig) -> Submissions | None:
    """The same; None when the cluster is not up."""
    from cluster.state.connection import head_is_silent, read_record
    from train_jobs.driver.submission import Submissions

    record = read_record(loaded.config.cluster.name)
    return Submissions(record) if record is not None and head_is_silent(record) is None else None


def _driver_statuses(loaded: LoadedConfig) -> dict[str, str] | None:
    """Ray's status of every submission; None when the cluster is not up."""
    submissions = submissions_if_up(loaded)
    return None if submissions is None else submissions.statuses()
