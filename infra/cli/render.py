"""What other systems are given, printed and not applied: `render`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.errors import RequestError
from infra.cli.common import FileOption, SetOption, load

if TYPE_CHECKING:
    from cluster.config.sections.cluster import ClusterConfig


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("render")(render)


def render(
    what: Annotated[
        str,
        typer.Argument(
            metavar="slurm|kubernetes|container",
            help="slurm: the batch script that `up` submits. kubernetes: the objects that it applies."
            " container: what the image of the pods is made from.",
        ),
    ],
    file: FileOption = None,
    settings: SetOption = None,
) -> None:
    """Print what `shoal up` would give to Slurm or Kubernetes; nothing is started."""
    if what == "container":
        from cluster.hosts.kubernetes.containerfile import containerfile

        typer.echo(containerfile(), nl=False)
        return
    if what not in _RENDERED:
        known = ", ".join((*_RENDERED, "container"))
        raise RequestError(f"there is nothing to render as '{what}'; there is: {known}")
    loaded = load(file, settings)
    cluster = loaded.resolved.cluster
    if cluster.provider != what:
        raise RequestError(f"the config has `provider: {cluster.provider}`, not {what}")
    typer.echo(_RENDERED[what](cluster, loaded.path.absolute()), nl=False)


def _slurm(cluster: ClusterConfig, config_path: Path) -> str:
    from cluster.hosts.slurm.batch_script import batch_script

    return batch_script(cluster, config_path)


def _kubernetes(cluster: ClusterConfig, config_path: Path) -> str:
    """Secrets and all: who prints it should know where to."""
    from cluster.environment import passed_on
    from cluster.hosts.kubernetes.manifests import as_yaml, manifests
    from cluster.state.record import new_token

    environment = passed_on(cluster.env, os.environ, "cluster.env")
    return as_yaml(manifests(cluster, new_token(), environment))


_RENDERED: dict[str, Callable[[ClusterConfig, Path], str]] = {"slurm": _slurm, "kubernetes": _kubernetes}
