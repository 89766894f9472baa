"""The model registry from the command line: `models`, `promote`."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json, say
from infra.cli.target import target_if_up


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("models")(models)
    app.command("promote")(promote)


def models(file: FileOption = None, settings: SetOption = None, as_json: JsonOption = False) -> None:
    """List the published models and their versions; works without a running cluster."""
    rows, storage = _versions(file, settings)
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(f"nothing is published in {storage}/models yet")
        return
    _print_table(rows)
    typer.echo(f"each is a directory: {storage}/models/MODEL/VERSION")


def promote(
    reference: Annotated[
        str, typer.Argument(metavar="MODEL@VERSION", help="A published version; also MODEL@latest.")
    ],
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="What shall name it, such as production.")],
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let MODEL@ALIAS name this version from now on; works without a running cluster."""
    name, _, version = reference.partition("@")
    row = _promoted(name, version, alias, file, settings)
    before, after = row.pop("before"), row["version"]
    change = f"{after}, as before" if before == after else f"{before or 'none'} -> {after}"
    (say if as_json else typer.echo)(f"{name}@{alias}: {change}")
    if as_json:
        print_json(row)


def _versions(file: str | None, settings: list[str] | None) -> tuple[list[dict[str, Any]], str]:
    """Every version, and the storage that they are in."""
    from infra.api.client import NoAnswerError

    target = target_if_up(file, settings)
    if target is not None:
        try:
            document = target.api.get("/models")
            return document["models"], document["storage"]
        except NoAnswerError:
            if not target.is_here:
                raise
    from cluster.files.storage import Storage
    from cluster.models.registry import Registry

    storage = Storage(load(file, settings, across=False).resolved.cluster.storage)
    return [version.as_json() for version in Registry(storage).list()], storage.location


def _promoted(
    name: str, version: str, alias: str, file: str | None, settings: list[str] | None
) -> dict[str, Any]:
    """The row of the version that an alias names now, and the one that it named `before`."""
    from infra.api.client import NoAnswerError

    target = target_if_up(file, settings)
    if target is not None:
        path = f"/models/{quote(name, safe='')}/aliases/{quote(alias, safe='')}"
        try:
            row: dict[str, Any] = target.api.put(path, {"version": version})
            return row
        except NoAnswerError:
            if not target.is_here:
                raise
    from cluster.files.storage import Storage
    from cluster.models.registry import Registry

    registry = Registry(Storage(load(file, settings, across=False).resolved.cluster.storage))
    before = registry.aliases(name).get(alias)
    reference = f"{name}@{version}" if version else name
    return {**registry.promote(reference, alias).as_json(), "before": before}


def _print_table(versions: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "version", "aliases", "job", "step", "published"):
        table.add_column(
            heading, justify="right" if heading in ("version", "step") else "left", overflow="fold"
        )
    for version in versions:
        job, step = (("" if version[key] is None else str(version[key])) for key in ("job", "step"))
        aliases = ", ".join(version["aliases"])
        table.add_row(version["name"], str(version["version"]), aliases, job, step, version["created_at"])
    Console().print(table)
