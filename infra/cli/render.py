"""What other systems are given, printed and not applied: `render`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.errors import RequestError
from infra.cli.common import FileOption, SetOption, load

_KINDS = ("slurm",)


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("render")(render)


def render(
    what: Annotated[str, typer.Argument(metavar="slurm", help="slurm: the batch script that `up` submits.")],
    file: FileOption = None,
    settings: SetOption = None,
) -> None:
    """Print what `shoal up` would give to Slurm; nothing is started."""
    if what not in _KINDS:
        raise RequestError(f"there is nothing to render as '{what}'; there is: {', '.join(_KINDS)}")
    from cluster.hosts.slurm.batch_script import batch_script

    loaded = load(file, settings, across=False)
    cluster = loaded.resolved.cluster
    if cluster.provider != what:
        raise RequestError(f"the config has `provider: {cluster.provider}`, not {what}")
    typer.echo(batch_script(cluster, loaded.path.absolute()), nl=False)
