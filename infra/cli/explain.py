"""Why a job or an app waits, or has what it has: `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.common import FileOption, JsonOption, load, print_json

if TYPE_CHECKING:
    from cluster.config.sections.root import ShoalConfig
    from cluster.errors import ShoalError

JOB, APP = "job/", "app/"
"""How the holders of their leases begin."""


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("explain")(explain)


def explain(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A job's id or name, an app, or a lease's holder.")
    ],
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a job or an app waits, or has the devices it has."""
    loaded = load(file, across=False)

    from cluster.files.storage import Storage
    from cluster.state.connection import connect, disconnect, require_record
    from train_jobs.driver.submission import Submissions
    from train_jobs.records.listing import list_jobs

    record = require_record(loaded.config.cluster.name)
    storage = Storage(record.storage)
    jobs = list_jobs(storage)
    connect(record)
    try:
        from cluster.sharing.client import BrokerClient

        broker = BrokerClient()
        known = [row["holder"] for row in broker.leases()]
        holders = holders_of(name, known, jobs)
        found = [row for row in map(broker.explain, holders) if row is not None]
        note = _why_away(name, known)
    finally:
        disconnect()
    if not found:
        jobs = list_jobs(storage, Submissions(record).statuses())
        raise nothing_to_explain(name, known, jobs, loaded.config)
    if as_json:
        print_json({"name": name, "leases": found, "note": note})
        return
    if note:
        typer.echo(f"{note}.")
    for row in found:
        typer.echo(f"{row['text']}.")


def _why_away(name: str, holders: Iterable[str]) -> str | None:
    """Why the app of this name does not answer though it has its devices; None where that is not so."""
    if not any(holder.startswith(APP) for holder in holders):
        return None  # nothing is served: what asks Serve is not even loaded
    from cluster.errors import ShoalError
    from serve_apps.status import app_statuses

    try:
        notes = {row["name"]: row["note"] for row in app_statuses()}
    except ShoalError as error:  # what is known of the leases is said all the same
        return str(error)
    return notes.get(name.removeprefix(APP))


def holders_of(name: str, holders: Iterable[str], jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The holders of leases that a name means: of an app, with the leases of its rollout; of a job, or of the
    newest job of a name that has a lease; or the one that has this very name."""
    known = sorted(holders)
    newest = [row["job"] for row in reversed(jobs) if row["name"] == name and JOB + row["job"] in known][:1]
    wanted = {name, APP + name, JOB + name, *(JOB + job for job in newest)}
    return [holder for holder in known if holder in wanted or holder.startswith(f"{APP}{name}:")]


def nothing_to_explain(
    name: str, holders: Sequence[str], jobs: Sequence[Mapping[str, Any]], config: ShoalConfig
) -> ShoalError:
    """Why there is nothing to say about a name: it has no lease now, or nobody knows it."""
    from cluster.errors import RequestError, ShoalError

    of_name = [row for row in jobs if name in (row["job"], row["name"])]
    if of_name:
        row = of_name[-1]
        return ShoalError(f"{row['job']} has no lease: it {_is(row['status'])}")
    if name in config.serve_apps:
        return ShoalError(f"app {name} has no lease: it does not run; `shoal serve {name}` starts it")
    if name in config.train_jobs:
        return ShoalError(f"no job {name} was submitted yet; `shoal train {name}` does that")
    names = {holder.partition("/")[2] for holder in holders}
    names |= {row["name"] for row in jobs} | config.serve_apps.keys() | config.train_jobs.keys()
    known = f"known are {', '.join(sorted(names))}" if names else "there are no jobs and no apps"
    return RequestError(f"nothing is called {name!r} here; {known}")


def _is(status: str) -> str:
    return {"succeeded": "succeeded", "failed": "failed", "stopped": "was stopped"}.get(
        status, f"is {status}"
    )
