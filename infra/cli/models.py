"""The model registry from the command line: `models`, `promote`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json, say

if TYPE_CHECKING:
    from cluster.models.registry import Version


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("models")(models)
    app.command("promote")(promote)


def models(file: FileOption = None, settings: SetOption = None, as_json: JsonOption = False) -> None:
    """List the published models and their versions; works without a running cluster."""
    from cluster.files.storage import Storage
    from cluster.models.registry import Registry

    loaded = load(file, settings, across=False)
    storage = Storage(loaded.resolved.cluster.storage)
    versions = Registry(storage).list()
    if as_json:
        print_json([_row(version) for version in versions])
        return
    if not versions:
        typer.echo(f"nothing is published in {storage.child('models').location} yet")
        return
    _print_table(versions)
    typer.echo(f"each is a directory: {storage.child('models').location}/MODEL/VERSION")


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
    from cluster.files.storage import Storage
    from cluster.models.registry import Registry

    loaded = load(file, settings, across=False)
    registry = Registry(Storage(loaded.resolved.cluster.storage))
    name = reference.partition("@")[0]
    before = registry.aliases(name).get(alias)
    version = registry.promote(reference, alias)
    after = version.version
    change = f"{after}, as before" if before == after else f"{before or 'none'} -> {after}"
    (say if as_json else typer.echo)(f"{name}@{alias}: {change}")
    if as_json:
        print_json(_row(version))


def _row(version: Version) -> dict[str, object]:
    return {
        "name": version.name,
        "version": version.version,
        "aliases": list(version.aliases),
        "path": version.path,
        "job": version.job,
        "step": version.step,
        "created_at": version.created_at,
    }


def _print_table(versions: list[Version]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "version", "aliases", "job", "step", "published"):
        table.add_column(
            heading, justify="right" if heading in ("version", "step") else "left", overflow="fold"
        )
    for version in versions:
        job = "" if version.job is None else str(version.job)
        step = "" if version.step is None else str(version.step)
        aliases = ", ".join(version.aliases)
        table.add_row(version.name, str(version.version), aliases, job, step, version.created_at)
    Console().print(table)
