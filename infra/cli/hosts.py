"""Hosts that Shoal has started Ray on: `ssh`, as Slurm has it too."""

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
    """Log in on a node of a cluster with `provider: ssh` or `slurm`, or run a command there."""
    from cluster.hosts.slurm.batch_job import read_batch_job
    from cluster.hosts.ssh.fleet import require_fleet

    name = cluster_name(file)
    job = read_batch_job(name)
    # A terminal is for a shell only: with one, what a command prints would not stay as it is.
    if job is not None:
        from cluster.hosts.slurm import slurm_commands as slurm

        words = tuple(command or (os.environ.get("SHELL", "/bin/sh"), "-l"))
        arguments = slurm.step(words, job=job.number, node=node, terminal=not command)
        os.execvpe(arguments[0], arguments, slurm.outside_of_jobs(os.environ))
    from cluster.hosts.ssh.ssh_connection import Connection

    connection = Connection(require_fleet(name).host(node).destination)
    connection.open()
    arguments = connection.command(command or (), terminal=not command)
    os.execvp(arguments[0], arguments)
