"""API keys from the command line: `key`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json, say


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
    loaded = load(file, settings, across=False)

    from pydantic import ValidationError

    from cluster.config.reading.api_keys import ENVIRONMENT, Key, add_entry, digest_of, new_key, parse_keys
    from cluster.errors import RequestError
    from cluster.state.state_directory import write_private

    source = loaded.resolved.cluster.gateway.keys
    if source is None or source.startswith(ENVIRONMENT):
        raise RequestError("the config's cluster.gateway.keys names no file that a key could be added to")
    secret = new_key()
    try:
        entry = Key(
            sha256=digest_of(secret),
            tenant=tenant,
            apps=tuple(app) if app else None,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            metrics=metrics,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RequestError(f"{first['loc'][0]}: {first['msg']}") from error
    path = Path(source)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    parse_keys(text, source)
    os.makedirs(path.parent, exist_ok=True)
    write_private(path, add_entry(text, entry))
    if as_json:
        print_json({"key": secret, "tenant": tenant, "file": source})
        return
    say(f"added to {source}; the key is shown this once")
    typer.echo(secret)
