"""Checkpoints of jobs from the command line: `checkpoints`, `export`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from infra.cli.common import FileOption, JobArgument, JsonOption, load, print_json
from infra.cli.target import target_if_up


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("checkpoints")(checkpoints)
    app.command("export")(export)


def checkpoints(job: JobArgument, file: FileOption = None, as_json: JsonOption = False) -> None:
    """List the checkpoints of a job; works without a running cluster."""
    found, rows = _rows(job, file)
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(f"{found} has no checkpoints yet")
        return
    _print_table(rows)
    typer.echo(f"{found}; `shoal export {found}@STEP DIR` writes the model of one")


def export(
    which: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="A job, and a step; else its newest.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; made by this.")],
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a model in the Hugging Face format; works without a running cluster."""
    from cluster.errors import RequestError
    from cluster.files.storage import Storage
    from train_jobs.records.listing import find_job, run_of
    from train_jobs.records.run_config import read_run_config

    name, at, text = which.rpartition("@") if "@" in which else (which, "", "")
    if at and not text.isdecimal():
        raise RequestError(f"{which!r}: after the @ stands a step, a whole number")
    loaded = load(file, across=False)
    storage = Storage(loaded.resolved.cluster.storage)
    job = find_job(storage, name)
    _, config = read_run_config(storage, job)
    sys.path.insert(0, str(config.folder(loaded.base)))  # a task of the user's lies there

    # DeepSpeed, where it is installed, and a task of the user's may print; the result stands alone.
    with contextlib.redirect_stdout(sys.stderr):
        from train_jobs.checkpoint.export import export_checkpoint

        wanted = int(text) if at else None
        step = export_checkpoint(run_of(storage, job), config, wanted, directory.absolute())
    if as_json:
        print_json({"job": job, "step": step, "path": str(directory.absolute())})
    else:
        typer.echo(f"{job} at step {step} is in {directory}")


def _rows(job: str, file: str | None) -> tuple[str, list[dict[str, Any]]]:
    """The job's id, and its checkpoints."""
    from infra.api.client import NoAnswerError

    target = target_if_up(file)
    if target is not None:
        try:
            document = target.api.get(f"/jobs/{quote(job, safe='')}/checkpoints")
            return document["job"], document["checkpoints"]
        except NoAnswerError:
            if not target.is_here:
                raise
    from cluster.files.storage import Storage
    from infra.api.checkpoints import checkpoints_of

    document = checkpoints_of(Storage(load(file, across=False).resolved.cluster.storage), job)
    return document["job"], document["checkpoints"]


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("step", "size", "evaluation", "state"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        means = (row["evaluation"] or {}).items()
        shown = ", ".join(f"{name} {value:.4f}" for name, value in means if isinstance(value, float))
        size = f"{row['size_bytes'] / 1e6:,.1f} MB" if row["size_bytes"] is not None else ""
        state = "complete" if row["complete"] else row["damage"] or "not complete"
        table.add_row(str(row["step"]), size, shown, state)
    Console().print(table)
