"""Clusters that somebody else has brought up: `connect`, `use`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from cluster.errors import RequestError, ShoalError
from infra.api import API_VERSION
from infra.cli.common import JsonOption, print_json, say


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    for command in (connect, use):
        app.command(command.__name__)(command)


def connect(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a control API: http(s)://HOST:PORT.")],
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Read the token from this file, now and at every command. Default: ask for it, and keep it.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the context. Default: the cluster's.")
    ] = None,
    certificate_authority: Annotated[
        Path | None,
        typer.Option(
            "--certificate-authority",
            metavar="FILE",
            help="Certificates (PEM) to trust beside those of the system.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Use a cluster that somebody else brought up: it becomes the current context."""
    from infra.api.client import ApiClient
    from infra.api.contexts import Context, Contexts, read_contexts, write_contexts

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise RequestError(f"{url!r} should be http://HOST:PORT or https://HOST:PORT, without a path")
    context = Context(
        url=f"{parts.scheme}://{parts.netloc}",
        cluster="",
        token=None if token_file is not None else _ask_for_token(),
        token_file=None if token_file is None else str(token_file.absolute()),
        authority=None if certificate_authority is None else str(certificate_authority.absolute()),
    )
    there = ApiClient(context.endpoint(), patience_s=0.0).get("/version")
    if there.get("api") != API_VERSION:
        raise ShoalError(
            f"{url} speaks version {there.get('api')} of the control API, and this command version"
            f" {API_VERSION}: install Shoal {there.get('shoal')} here"
        )
    context = replace(context, cluster=there["cluster"])
    if parts.scheme == "http" and not _is_near(parts.hostname):
        say("http, not https: the token and all else can be read on the way")
    chosen, known = name or there["cluster"], read_contexts().known
    write_contexts(Contexts(chosen, {**known, chosen: context}))
    if as_json:
        print_json({"context": chosen, **there})
    else:
        caller = there["caller"]
        typer.echo(f"connected to cluster {there['cluster']} as {caller['name']} ({caller['role']})")


def use(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A context. Default: list them.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Use none: only what was brought up here.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove NAME, and the token kept with it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Choose the current context; it counts where the config's cluster is not up from here."""
    from infra.api.contexts import Contexts, read_contexts, write_contexts

    contexts = read_contexts()
    if (name is None and forget) or (name is not None and none):
        raise RequestError("--forget goes with a NAME, and --none without one")
    if name is not None:
        contexts.get(name)
    if forget:
        known = {each: context for each, context in contexts.known.items() if each != name}
        contexts = Contexts(None if contexts.current == name else contexts.current, known)
    elif name is not None or none:
        contexts = replace(contexts, current=name)
    if name is not None or none:
        write_contexts(contexts)
    if as_json:
        rows = [
            {
                "name": each,
                "cluster": context.cluster,
                "url": context.url,
                "current": each == contexts.current,
            }
            for each, context in contexts.known.items()
        ]
        print_json(rows)
    elif name is None and not none:
        for each, context in contexts.known.items():
            mark = "*" if each == contexts.current else " "
            typer.echo(f"{mark} {each}  {context.url}  (cluster {context.cluster})")
        if not contexts.known:
            typer.echo("no contexts yet; `shoal connect URL` makes one")
    else:
        typer.echo(f"current context: {contexts.current or 'none'}")


def _ask_for_token() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("token", hide_input=True, err=True)).strip()
    given = sys.stdin.readline().strip()
    if not given:
        raise RequestError("a token is needed: --token-file FILE, or on standard input")
    return given


def _is_near(host: str) -> bool:
    from cluster.loopback import is_own

    return is_own(host)
