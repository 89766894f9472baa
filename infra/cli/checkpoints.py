"""Checkpoints of jobs from the command line: `checkpoints`, `export`."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.parse import quote

import typer

from infra.cli.common import FileOption, JobArgument, JsonOption, load, print_json
from infra.cli.target import Target, target_if_up


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

    name, at, text = which.rpartition("@") if "@" in which else (which, "", "")
    if at and not text.isdecimal():
        raise RequestError(f"{which!r}: after the @ stands a step, a whole number")
    wanted, target = int(text) if at else None, target_if_up(file)
    if target is not None and not target.is_here:
        job, step = _export_there(target, file, name, wanted, directory.absolute())
    else:
        job, step = _export_here(file, name, wanted, directory.absolute())
    if as_json:
        print_json({"job": job, "step": step, "path": str(directory.absolute())})
    else:
        typer.echo(f"{job} at step {step} is in {directory}")


def _export_here(file: str | None, name: str, step: int | None, directory: Path) -> tuple[str, int]:
    """Export from the storage; the job's id, and the step."""
    from cluster.files.storage import Storage
    from infra.api.export_process import export as write_model
    from train_jobs.records.listing import find_job
    from train_jobs.records.run_config import read_run_config

    loaded = load(file, across=False)
    storage = Storage(loaded.resolved.cluster.storage)
    job = find_job(storage, name)
    _, config = read_run_config(storage, job)
    return job, write_model(storage, job, step, config.folder(loaded.base), directory)


def _export_there(
    target: Target, file: str | None, name: str, step: int | None, directory: Path
) -> tuple[str, int]:
    """Have it exported on the head, and take it here; the job's id, and the step.

    Raises:
        RequestError: there is no such checkpoint, or the directory is there.
        ShoalError: it cannot be exported, or broke off; nothing of it is left.
    """
    from cluster.errors import ConfigError, RequestError

    if directory.exists():
        raise RequestError(f"{directory} is there already; a model is written into a new directory")
    document = target.api.get(f"/jobs/{quote(name, safe='')}")
    with tempfile.TemporaryFile() as archive:

        def fetch(travelling: dict[str, Any]) -> dict[str, Any]:
            body = {"step": step, "package": travelling["package"]}
            return dict(target.api.download(f"/jobs/{document['job']}/export", body, archive))

        headers = None
        try:
            loaded = load(file, across=False)
        except ConfigError:
            loaded = None  # whoever has a context needs no config
        config = None if loaded is None else loaded.resolved.train_jobs.get(document["name"])
        if loaded is not None and config is not None and config.is_custom:
            from infra.cli.submitting import send_with

            headers = send_with(target.api, config, loaded, fetch)
        else:
            headers = fetch({"package": None})
        archive.seek(0)
        unpack(archive, directory)
    return headers["x-shoal-job"], int(headers["x-shoal-step"])


def unpack(archive: IO[bytes], directory: Path) -> None:
    """Write the files of a tar archive into a new directory, which is whole when it is there.

    Raises:
        ShoalError: the archive is cut off, or holds what no model has.
    """
    from cluster.errors import ShoalError

    directory.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        with tarfile.open(fileobj=archive, mode="r:") as opened:
            opened.extractall(staged, filter="data")
        staged.chmod(0o755)
        staged.rename(directory)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ShoalError(f"the model did not arrive whole: {error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


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
