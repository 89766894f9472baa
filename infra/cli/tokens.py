"""Who may use a cluster from elsewhere, and what they have done: `token`, `tokens`, `audit`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from infra.cli.common import FileOption, JsonOption, print_json, say
from infra.cli.target import find_target


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    for command in (token, tokens, audit):
        app.command(command.__name__)(command)


def token(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Who it is for, as `shoal audit` will name them.")
    ],
    role: Annotated[
        str,
        typer.Option(
            "--role",
            metavar="read|run|admin",
            help="read sees all; run also submits, stops and serves; admin also makes tokens.",
        ),
    ] = "run",
    days: Annotated[
        float | None,
        typer.Option("--days", metavar="N", help="How long it is valid. Default: until revoked."),
    ] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take NAME's token back instead.")] = False,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token for somebody who is to use this cluster from elsewhere; it is shown this once."""
    api = find_target(file).api
    if revoke:
        document = api.delete(f"/tokens/{quote(name, safe='')}")
        if as_json:
            print_json(document)
        else:
            typer.echo(f"the token of {name} opens nothing any more")
        return
    document = api.post("/tokens", {"name": name, "role": role, "days": days})
    if as_json:
        print_json({**document, "url": api.endpoint.url})
        return
    say(f"for `shoal connect {api.endpoint.url}`; it is shown this once")
    typer.echo(document["token"])


def tokens(file: FileOption = None, as_json: JsonOption = False) -> None:
    """List the tokens that were made, and what they open."""
    rows = find_target(file).api.get("/tokens")
    if as_json:
        print_json(rows)
    elif not rows:
        typer.echo("no tokens were made; `shoal token NAME` makes one")
    else:
        _print_table(("name", "role", "created_at", "created_by", "expires_at"), rows)


def audit(
    most: Annotated[int, typer.Option("--tail", "-n", min=1, metavar="N", help="The last lines.")] = 100,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who has changed what through the control API, when, and what came of it."""
    rows = find_target(file).api.get("/audit", most=most)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        time = datetime.fromisoformat(row["time"]).astimezone()
        why = f" ({row['reason']})" if row["reason"] else ""
        made = f" {row['result']}" if row["result"] else ""
        what = f"{row['operation']} {row['target']}: {row['outcome']}{made}{why}"
        typer.echo(f"{time:%Y-%m-%d %H:%M:%S} {row['who']} ({row['role']}) from {row['address']}: {what}")


def _print_table(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if row[column] is None else str(row[column])) for column in columns))
    Console().print(table)
