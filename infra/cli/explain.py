"""Why a job or an app waits, or has what it has: `explain`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from cluster.errors import ConfigError, RequestError, ShoalError
from infra.cli.common import FileOption, JsonOption, load, print_json
from infra.cli.target import find_target


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
    try:
        document = find_target(file).api.get(f"/explain/{quote(name, safe='')}")
    except RequestError:
        hint = _of_the_config(name, file)
        if hint is None:
            raise
        raise ShoalError(hint) from None
    if as_json:
        print_json(document)
        return
    if document["note"]:
        typer.echo(f"{document['note']}.")
    for row in document["leases"]:
        typer.echo(f"{row['text']}.")


def _of_the_config(name: str, file: str | None) -> str | None:
    """What is to be done about a name that the cluster has not heard of, and the config has."""
    try:
        config = load(file, across=False).config
    except ConfigError:  # whoever has a context may have no config
        return None
    if name in config.serve_apps:
        return f"app {name} has no lease: it does not run; `shoal serve {name}` starts it"
    if name in config.train_jobs:
        return f"no job {name} was submitted yet; `shoal train {name}` does that"
    return None
