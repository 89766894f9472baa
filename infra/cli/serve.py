"""Serving from the command line: `serve`, `unserve` and `rollback`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cluster.errors import RequestError, ShoalError
from infra.api.client import APPLY_TIMEOUT_S, ApiClient
from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json, say
from infra.cli.submitting import placed
from infra.cli.target import Target, find_target

if TYPE_CHECKING:
    from cluster.config.loader import LoadedConfig

READY_TIMEOUT_S = 600.0
"""How long a command follows a rollout; the rollout itself goes on without it."""
_LOOK_S = 0.2


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
    target = find_target(file, settings if scope is None else None)
    result = deploy(target, loaded, names or ())
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
    api = find_target(file).api
    api.delete(f"/apps/{quote(name, safe='')}")
    rows = api.get("/apps")
    while any(row["name"] == name for row in rows):
        threading.Event().wait(_LOOK_S)
        rows = api.get("/apps")
    if as_json:
        print_json({"removed": name, "apps": rows})
    else:
        typer.echo(f"{name} is not served any more")


def rollback(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The app that goes back.")],
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring back what an app served before, also in the middle of a rollout."""
    api = find_target(file).api
    number = api.post(f"/apps/{quote(name, safe='')}/rollback")["number"]
    row = follow_rollout(api, name, number, back=True)
    if as_json:
        print_json(row)
    else:
        typer.echo(f"{name} serves {row['model']}")


def deploy(target: Target, loaded: LoadedConfig, names: Sequence[str]) -> dict[str, Any]:
    """Serve apps of the config, all of them where none is named, and wait until they can answer.

    Returns:
        {"base_url", "apps": [the rows of these apps]}

    Raises:
        RequestError: no such app.
        ConfigError: one does not fit the cluster.
        ShoalError: one could not be brought there; one that was there before serves as it did.
    """
    api, config = target.api, loaded.resolved
    chosen = list(names) or list(config.serve_apps)
    if not chosen:
        raise RequestError("the config has no serve_apps; `shoal init` shows how one is written")
    for name in chosen:
        if name not in config.serve_apps:
            known = ", ".join(config.serve_apps) or "none"
            raise RequestError(f"there is no app '{name}' in the config; serve_apps has: {known}")
    begun = {}
    for name in chosen:  # all of them come up side by side
        section = config.serve_apps[name].model_dump(mode="json", by_alias=True)
        with placed(target, loaded, "serve_apps", name):
            begun[name] = api.put(f"/apps/{quote(name, safe='')}", section, timeout_s=APPLY_TIMEOUT_S)
        if begun[name]["number"] is None:
            say(f"{name}: runs already as the config says")
    for name, rollout in begun.items():
        if rollout["number"] is not None:
            follow_rollout(api, name, rollout["number"])
    rows = [row for row in api.get("/apps") if row["name"] in begun]
    return {"base_url": begun[chosen[0]]["base_url"], "apps": rows}


def follow_rollout(api: ApiClient, name: str, number: int, *, back: bool = False) -> dict[str, Any]:
    """Say how a rollout goes until it has ended; the app's row.

    Raises:
        ShoalError: it failed, or takes too long.
    """
    path = f"/apps/{quote(name, safe='')}/rollouts/{number}/stream"
    row: dict[str, Any] = {}
    said = None
    for told in api.stream(path, timeout_s=READY_TIMEOUT_S, back=str(back).lower()):
        if told.kind == "failed":
            raise ShoalError(told.data["message"])
        if told.kind == "end":
            row = told.data
        elif told.data["text"] != said:  # whoever was cut off is told the last sentence again
            said = told.data["text"]
            say(said)
    return row


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
