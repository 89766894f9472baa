"""Hosts that Shoal has started Ray on: `ssh`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from infra.cli.common import FileOption
from infra.cli.target import cluster_name

UNKNOWN_TO_CLICK = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("ssh", context_settings=UNKNOWN_TO_CLICK)(ssh)


def ssh(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node, by its name in the config.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]…", help="What to run there. Default: a shell."),
    ] = None,
    file: FileOption = None,
) -> None:
    """Log in on a node of a cluster with `provider: ssh`, or run a command there."""
    from cluster.hosts.ssh.fleet import require_fleet
    from cluster.hosts.ssh.ssh_connection import Connection

    connection = Connection(require_fleet(cluster_name(file)).host(node).destination)
    connection.open()
    # A terminal is for a shell only: with one, what a command prints would not stay as it is.
    arguments = connection.command(command or (), terminal=not command)
    os.execvp(arguments[0], arguments)
