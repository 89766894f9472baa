"""`shoal quickstart`: all of it in minutes, on this machine or on a cluster of yours."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.common import JsonOption, interrupt_at_sigterm, load, print_json, say

if TYPE_CHECKING:
    from infra.tour.tour_report import QuickstartReport


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    app.command("quickstart")(quickstart)


def quickstart(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="An empty directory to work in. Default: a temporary one, removed when all went well.",
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster and the files there.")] = False,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="A config on whose `cluster` the tour is to run. Default: a cluster of this machine.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", hidden=True, help="The cluster's name; the files are beside FILE.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a cluster, train, kill a worker, publish, serve, share devices, and say what was measured."""
    from cluster.errors import RequestError
    from infra.tour.quickstart import Quickstart

    around = None if file is None else load(file, across=False)
    if name is not None and around is not None:
        directory = around.path.parent / "quickstart"

    if directory is not None and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RequestError(f"{directory} is not an empty directory; quickstart writes its files there")
    with ExitStack() as stack:
        if directory is None:
            kept = Path(tempfile.mkdtemp(prefix="shoal-quickstart-"))
            if not keep:
                stack.callback(_remove, kept)
            directory = kept
        directory.mkdir(parents=True, exist_ok=True)
        interrupt_at_sigterm()
        # Ray tells whoever has deployed an app, on standard output, of every process that is ended later.
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            report = Quickstart(directory.resolve(), say, keep=keep, around=around, name=name).run()
        if not report.ok:
            stack.pop_all()  # its logs say what went wrong
            say(f"its jobs, logs and events are in {directory.resolve()}")
        if as_json:
            print_json(report.as_json())
        else:
            _print(report, directory, keep)
    if not report.ok:
        raise typer.Exit(1)


def _remove(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def _print(report: QuickstartReport, directory: Path, keep: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=f"quickstart: {report.seconds:.0f} s")
    table.add_column("step", no_wrap=True)
    table.add_column("")
    table.add_column("seconds", justify="right")
    table.add_column("what was seen", overflow="fold")
    for step in report.steps:
        table.add_row(step.name, "ok" if step.ok else "FAILED", f"{step.seconds:.1f}", step.detail)
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    if keep:
        console.print(f"It runs on: cd {directory} and try `shoal status`, `shoal jobs`, `shoal down`.")
    else:
        console.print("To do it yourself:")
        for command in (
            "shoal init demo && cd demo",
            "shoal up",
            "shoal train stdlib-lm",
            "shoal serve chat",
            "shoal status",
            "shoal down",
        ):
            console.print(f"  {command}")
