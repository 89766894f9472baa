"""The `shoal` command: gathers the nouns' commands and is where every run of it starts and ends."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cluster.version import version
from infra.cli import common
from infra.cli.target import CONTEXT_VARIABLE

NOUNS = (
    "config",
    "render",
    "cluster",
    "explain",
    "train",
    "logs",
    "hosts",
    "checkpoints",
    "serve",
    "batch",
    "keys",
    "contexts",
    "tokens",
    "models",
    "bench",
    "quickstart",
)
"""Modules of infra.cli, in the order of the help; each has `register(app)` and imports nothing heavy."""


def build() -> typer.Typer:
    """The command line with the commands of all nouns."""
    app = typer.Typer(
        name="shoal",
        help="Train and serve on one shared Ray cluster, from one config file.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for noun in NOUNS:
        importlib.import_module(f"{__package__}.{noun}").register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {version()}")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="NAME",
            help="The cluster of this context (`shoal use` lists them). Also: $SHOAL_CONTEXT.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Options of the command itself; its commands have their own."""
    if context is not None:
        os.environ[CONTEXT_VARIABLE] = context


def call(arguments: Sequence[str]) -> int:
    """Run the command line with these arguments and return its exit code."""
    return common.run(lambda: build()(args=list(arguments), prog_name="shoal"))


def main() -> None:
    """The console entry point."""
    sys.exit(call(sys.argv[1:]))


if __name__ == "__main__":
    main()
