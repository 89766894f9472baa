"""Training from the command line: `train`, `jobs`, `stop`, `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast
from urllib.parse import quote

import typer

from cluster.wording import step_of
from infra.cli.common import FileOption, JobArgument, JsonOption, SetOption, load, print_json, say
from infra.cli.submitting import send_with, submit
from infra.cli.target import find_target, target_if_up

if TYPE_CHECKING:
    from cluster.config.loader import LoadedConfig
    from cluster.files.storage import Storage
    from infra.api.client import ApiClient
    from infra.job_logs import EntryKind

STOP_TIMEOUT_S = 150.0
"""More than Ray gives a driver between SIGTERM and SIGKILL."""

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
    config = loaded.resolved.train_jobs[name]
    target = find_target(file)
    submitted = submit(target, name, config, loaded)
    _after_submission(target.api, submitted["job"], submitted["submission_id"], detach, as_json)


def jobs(file: FileOption = None, as_json: JsonOption = False) -> None:
    """List all jobs of the cluster's storage, oldest first; works without a running cluster."""
    rows = _jobs(file)
    if as_json:
        print_json(rows)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

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
    from infra.api.place import NOW

    api = find_target(file).api
    found = api.post(f"/jobs/{quote(job, safe='')}/stop")["job"]
    stream = api.stream(f"/jobs/{found}/stream", after=NOW, timeout_s=STOP_TIMEOUT_S)
    result = next(event.data for event in stream if event.kind == "end")
    if as_json:
        print_json(result)
    else:
        typer.echo(f"{found} {_ended(result['status'])} at step {result['step']}")


def resume(
    job: JobArgument,
    file: FileOption = None,
    settings: SetOption = None,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with a job that ended early, from its newest checkpoint; --set changes its settings."""
    loaded = load(file, across=False)

    from cluster.config.sections.train import TrainJobConfig

    api = find_target(file).api
    path = f"/jobs/{quote(job, safe='')}/resume"
    changes = {"settings": list(settings or ()), "base": str(loaded.base)}
    plan = api.post(path, {**changes, "only_plan": True})
    for sentence in plan["said"]:
        say(sentence)
    config = TrainJobConfig.model_validate(plan["config"])
    resumed = send_with(api, config, loaded, lambda traveller: api.post(path, {**changes, **traveller}))
    # What it did before is told already.
    after = plan["place"]
    _after_submission(api, resumed["job"], resumed["submission_id"], detach, as_json, after)


def _after_submission(
    api: ApiClient, job: str, submission_id: str, detach: bool, as_json: bool, after: str | None = None
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
    result, exit_code = follow_job(api, job, after)
    if as_json:
        print_json(result)
    else:
        _print_result(result)
    if result["status"] != "succeeded":
        raise typer.Exit(exit_code)


def follow_job(api: ApiClient, job: str, after: str | None = None) -> tuple[dict[str, Any], int]:
    """Show a job until it has ended; the document that `shoal train` returns, and its exit code.

    Args:
        after: the place in its stream that needs no telling.
    """
    from infra.job_logs import show, take
    from infra.job_view import view_for
    from train_jobs.records.run_log import RunSummary

    summary = RunSummary(job)
    try:
        with view_for(job, 0) as view:
            for told in api.stream(f"/jobs/{job}/stream", after=after):
                if told.kind == "end":
                    return told.data, summary.exit_code
                if told.kind == "note":
                    view.line(told.data["text"])
                elif told.kind in ("event", "metric", "printed"):
                    kind = cast("EntryKind", told.kind)
                    show(kind, take(kind, told.data, summary), summary, view)
    except KeyboardInterrupt:
        say(f"\n{job} goes on without us; `shoal stop {job}` stops it")
        raise
    raise AssertionError("a stream ends with its end, or raises")


def _print_result(result: dict[str, Any]) -> None:
    from infra.job_account import goodput_line, ranks_line

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


def _ended(status: str) -> str:
    return {"stopped": "was stopped"}.get(status, status)


def _jobs(file: str | None) -> list[dict[str, Any]]:
    """All jobs as the cluster tells them; as their files do, where it is not up."""
    from infra.api.client import NoAnswerError

    target = target_if_up(file)
    if target is not None:
        try:
            rows: list[dict[str, Any]] = target.api.get("/jobs")
            return rows
        except NoAnswerError:
            if not target.is_here:
                raise
    from train_jobs.records.listing import list_jobs

    return list_jobs(storage_of(load(file, across=False)))


def storage_of(loaded: LoadedConfig) -> Storage:
    """The storage that the config names."""
    from cluster.files.storage import Storage

    return Storage(loaded.resolved.cluster.storage)
