"""The config file from the command line: `init`, `validate`, `schema`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.errors import ConfigError, Mistake, RequestError
from cluster.wording import counted
from infra.cli.common import FileOption, JsonOption, SetOption, load, print_json

if TYPE_CHECKING:
    from cluster.config.loader import LoadedConfig
    from cluster.config.sections.serve import ServeAppConfig
    from train_jobs.driver.package import Package

_SHOWN_APPS = 8
"""Most apps whose engines `validate` names."""


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("init")(init)
    app.command("validate")(validate)
    app.command("schema")(schema)


def init(
    directory: Annotated[
        Path,
        typer.Argument(metavar="[DIR]", help="Where to write. Default: here.", show_default=False),
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are already there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a commented shoal.yaml that trains and serves as it is, and its schema for editors."""
    from cluster.config.template import write_template

    files = write_template(directory, force=force)
    if as_json:
        print_json({"files": [os.path.abspath(path) for path in files]})
        return
    for path in files:
        typer.echo(f"wrote {path}")


def validate(
    file: FileOption = None,
    settings: SetOption = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Do not ask the cluster which nodes it has: the file alone counts."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List every mistake of the config file, with its place."""
    try:
        loaded = load(file, settings, offline=offline)
        packages = _packages(loaded)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"ok": False, "errors": [mistake.as_json() for mistake in error.mistakes]})
        raise typer.Exit(error.exit_code) from error
    if as_json:
        print_json({"ok": True, "errors": []})
        return
    typer.echo(_summary(loaded))
    for name, package in packages.items():
        for sentence in package.sentences():
            typer.echo(f"{name}: {sentence}")


def _packages(loaded: LoadedConfig) -> dict[str, Package]:
    """What travels with each job.

    Raises:
        ConfigError: with every job whose folder is too large.
    """
    from cluster.config.checks.ground import local_path
    from train_jobs.driver.package import package_of

    storage = local_path(loaded.resolved.cluster.storage)
    others = [] if storage is None else [storage]
    packages, mistakes = {}, []
    for name, job in loaded.resolved.train_jobs.items():
        packages[name] = package_of(job, job.folder(loaded.base), others)
        try:
            if job.task != "script" or storage is None:  # a script's files go into the storage
                packages[name].check()
        except RequestError as error:
            place = str(loaded.path), None, None, f"train_jobs.{name}", None
            mistakes.append(Mistake(*place, str(error)))
    if mistakes:
        raise ConfigError(mistakes)
    return packages


def schema() -> None:
    """Print the JSON Schema of the config file, for editors."""
    from cluster.config.template import schema_text

    typer.echo(schema_text(), nl=False)


def _summary(loaded: LoadedConfig) -> str:
    config = loaded.config
    cluster = config.cluster
    nodes = cluster.node_count
    counts = (
        "nodes of others" if nodes is None else counted(nodes, "node"),
        counted(len(config.train_jobs), "job"),
        counted(len(config.serve_apps), "app") + _engines(config.serve_apps),
    )
    return f"{os.path.relpath(loaded.path)} is valid: {', '.join(counts)}"


def _engines(apps: Mapping[str, ServeAppConfig]) -> str:
    """What runs each app, the engines that nobody chose too: ` (chat: torch)`."""
    shown = [f"{name}: {app.engine}" for name, app in apps.items()][:_SHOWN_APPS]
    if len(apps) > _SHOWN_APPS:
        shown.append("…")
    return f" ({', '.join(shown)})" if shown else ""
