"""Serving from the command line: `serve`, `unserve` and `rollback`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json, say


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("serve")(serve)
    app.command("unserve")(unserve)
    app.command("rollback")(rollback)


def serve(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Apps of the config. Default: all.")
    ] = None,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve apps until they are ready; one that runs is changed by its rollout."""
    scope = f"serve_apps.{names[0]}" if names and len(names) == 1 else None
    loaded = load(file, settings, scope)

    from cluster.state.connection import connect, require_record

    connect(require_record(loaded.config.cluster.name))

    from serve_apps.commands import deploy

    result = deploy(loaded.resolved, names or (), say=say)
    if as_json:
        print_json(result)
    else:
        _print(result)


def unserve(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The app to take down.")],
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take an app down; requests that run are finished first."""
    loaded = load(file, across=False)

    from cluster.state.connection import connect, require_record

    connect(require_record(loaded.config.cluster.name))

    from serve_apps.commands import remove
    from serve_apps.status import app_statuses

    remove([name])
    if as_json:
        print_json({"removed": name, "apps": app_statuses()})
    else:
        typer.echo(f"{name} is not served any more")


def rollback(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The app that goes back.")],
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring back what an app served before, also in the middle of a rollout."""
    loaded = load(file, across=False)

    from cluster.state.connection import connect, require_record

    connect(require_record(loaded.config.cluster.name))

    from serve_apps.commands import roll_back

    row = roll_back(name, say=say)
    if as_json:
        print_json(row)
    else:
        typer.echo(f"{name} serves {row['model']}")


def _print(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("app", "model", "status", "replicas", "engine", "ranks each"):
        table.add_column(heading)
    for row in result["apps"]:
        numbers = (str(row["replicas"]), str(row["engine"]), str(row["tensor"]))
        table.add_row(row["name"], row["model"], row["status"], *numbers)
    console = Console()
    console.print(table)
    console.print(f"OpenAI base URL: {result['base_url']}", highlight=False)
