"""API keys from the command line: `key`."""

from __future__ import annotations

from typing import Annotated

import typer

from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json, say
from infra.cli.target import target_if_up


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("key")(key)


def key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Who the key is for.")],
    app: Annotated[
        list[str] | None, typer.Option("--app", metavar="APP", help="An app that it opens. Default: all.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most requests a minute.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most tokens a minute, prompts and answers.")
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="It opens /metrics and /load too, which tell of all apps.")
    ] = False,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an API key and add it to the gateway's key file; a running gateway takes it at once."""
    entry = {
        "tenant": tenant,
        "apps": list(app) if app else None,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "metrics": metrics,
    }
    target = target_if_up(file, settings)
    if target is not None and not target.is_here:
        made = target.api.post("/keys", entry)
        secret, source = made["key"], made["file"]
    else:
        from infra.api.gateway_keys import add_key

        source = load(file, settings, across=False).resolved.cluster.gateway.keys
        secret = add_key(source, entry)
    if as_json:
        print_json({"key": secret, "tenant": tenant, "file": source})
        return
    say(f"added to {source}; the key is shown this once")
    typer.echo(secret)
